"""Templates, scripts and the style sheet of the page."""
