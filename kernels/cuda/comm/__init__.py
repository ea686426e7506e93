"""Collectives between GPUs over peer memory."""
