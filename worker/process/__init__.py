"""This process: placement, heartbeat, memory, progress of loading."""
