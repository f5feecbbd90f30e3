"""Routers and callbacks of this library in other people's engines; each file needs its engine installed."""
