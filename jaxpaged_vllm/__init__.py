"""How vLLM finds jaxpaged's attention backend.

vLLM loads its plugins into every one of its processes, whether or not anybody asks for what they offer. So this package
imports neither JAX nor `jaxpaged` until vLLM is asked for `attention_backend="CUSTOM"`.
"""
