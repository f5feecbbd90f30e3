"""The MoE layer against its limit and its peers: `pointsman bench`.

Every implementation of a case lives in a process of its own; the processes take turns, one call each, on the same new
tokens, so that each call meets a routing it has not seen and a disturbance of the machine meets all alike.
"""
