"""Surgery on Hugging Face models: replace routers, materialize them, upcycle a dense model."""
