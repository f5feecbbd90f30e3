"""`python -m tools.bench`: the MoE layer against the dense limit and other libraries (peers).

Every implementation of a case runs in its own process. The processes take turns: each makes one call on the same new
tokens, so that every call has a new routing and disturbances of the machine affect all implementations equally.
"""
