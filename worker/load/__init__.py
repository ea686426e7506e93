"""From a path on disk to a loaded model."""
