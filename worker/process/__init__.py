"""This process: placement, heartbeat, memory."""
