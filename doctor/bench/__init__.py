"""Faulty programs with their mended twins, and healthy ones; `python -m bench` says what the doctor
names of them.
"""
