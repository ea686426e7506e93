"""The cluster as a client sees it: replica states, worlds, routing, open requests."""
