"""The routers of the papers, one file each."""
