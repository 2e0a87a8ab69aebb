"""What the system tells about itself: metrics and logs."""
