"""How the models of each JAX library are taken apart, called and put together again."""
