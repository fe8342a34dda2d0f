# docker build -t workbook . && docker run --rm -p 127.0.0.1:8888:8888 -v "$PWD/outputs:/workbook/outputs" workbook
# With cards: docker run --gpus all ..., after `docker build --build-arg TORCH=` with the wheel that fits your driver.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /workbook
COPY . .
ARG TORCH=""
RUN make env && if [ -n "$TORCH" ]; then .venv/bin/pip install --no-cache-dir $TORCH; fi
EXPOSE 8888
CMD [".venv/bin/jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--allow-root", "--no-browser"]
