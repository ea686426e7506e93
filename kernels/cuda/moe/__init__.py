"""Mixtures of experts: the choice of experts, sorted, and the products of those chosen."""
