"""Dtypes of JAX programs (S1 to S5): autocast as an interpreter of jaxprs, and models under a policy."""
