"""Formulas of methods: Q-learning, mixtures of experts."""
