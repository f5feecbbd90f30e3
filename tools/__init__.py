"""Programs of this repository: they make its pages and figures, and are installed nowhere."""
