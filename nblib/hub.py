"""Whether the hub of models can be reached, within seconds.

huggingface_hub tries each of its requests six times and waits between them. Without a network this
takes 23 s for a config and 48 s for a model, and prints a line for each try. One connection to the
hub, or to the proxy that leads there, says the same at once, and then only its cache is read.

Footgun: a network that lets one connect and then holds everything back is not noticed here.
"""

import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SECONDS = 3.0  # for a connection, and for finding the address of its host
PORTS = {"http": 80, "https": 443}


def address() -> str:
    """Return where the hub is."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def is_reachable() -> bool:
    """Return whether the hub can be reached; False also where HF_HUB_OFFLINE forbids to try."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    place = urlsplit(address())
    proxy = getproxies().get(place.scheme)
    if proxy and not proxy_bypass(place.hostname or ""):
        place = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    try:
        port = place.port or PORTS.get(place.scheme, 443)
    except ValueError:  # no number
        return False
    return _connects(place.hostname or "", port)


def _connects(host: str, port: int) -> bool:
    """Return whether a connection comes up in time."""
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=SECONDS).close()
            connected.set()
        except OSError:
            pass

    # looking up a host has no time limit of its own, so it happens beside us
    trying = threading.Thread(target=connect, daemon=True)
    trying.start()
    trying.join(SECONDS)
    return connected.is_set()
