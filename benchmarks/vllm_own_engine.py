"""The demo model's answers from jaxpaged's own engine in PyTorch, to set beside vLLM's.

python benchmarks/vllm_own_engine.py RESULT: the file for the tokens, as `vllm_case.py` writes them.
"""

import json
import sys
from pathlib import Path

from vllm_models import MAX_TOKENS, prompts

from jaxpaged.demo.engine import Engine
from jaxpaged.demo.model import load_demo_model
from jaxpaged.demo.scheduler import Request

if __name__ == "__main__":
    engine = Engine(load_demo_model())
    requests = [Request(f"prompt {i}", tokens, MAX_TOKENS) for i, tokens in enumerate(prompts("demo"))]
    for request in requests:
        engine.add(request)
    for _ in engine.run():
        pass
    Path(sys.argv[1]).write_text(json.dumps({"tokens": [request.generated for request in requests]}), encoding="utf-8")
