"""`python -m lessons.pitfalls`, in the folder of the notebooks: the catalogue, by what a person
sees.
"""

from lessons.pitfalls import catalogue

for pitfall in catalogue():
    print(f"{pitfall.id}  {pitfall.symptom}\n     {pitfall.title}. Fix: {pitfall.fix}")
