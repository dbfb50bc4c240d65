"""All-reduces as XLA has them: anywhere, of any size."""

from jax import lax


def device_sum(x, axis):
    """See the public entry of the same name. In which order XLA adds is its own affair; all devices
    get the same sum."""
    return lax.psum(x, axis)
