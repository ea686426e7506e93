"""Checks of hosts before a cluster starts there, and the cost of the link between them."""
