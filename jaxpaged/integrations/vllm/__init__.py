"""vLLM's attention by jaxpaged: what vLLM runs when it is asked for `attention_backend="CUSTOM"`.

`backend` has the classes that vLLM loads, and is the only module here that imports vLLM. How vLLM finds it: see the
package `jaxpaged_vllm`.
"""
