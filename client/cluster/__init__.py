"""The cluster as a client sees it: worlds, replicas, routing, open requests."""
