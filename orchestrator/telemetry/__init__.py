"""What the system tells about itself: metrics, logs and spans."""
