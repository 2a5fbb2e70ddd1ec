"""Engines that run on jaxpaged's attention."""
