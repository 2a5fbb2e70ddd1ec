"""jnp implementations for any device. What they compute is the definition of every other implementation."""
