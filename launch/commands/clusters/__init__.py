"""The commands on clusters that run: ps, stop, logs."""
