"""Pure functions on tensors: the fast paths and the plain references that they are held against."""
