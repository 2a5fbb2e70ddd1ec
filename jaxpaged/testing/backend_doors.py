"""The ways in through the classes for PyTorch engines. They write a case's new tokens, and then attend."""

import dataclasses
import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxpaged.testing.cases import QUANTIZED, Case, Inputs, aligned

_OPTIONS = {"scale", "causal", "window", "soft_cap", "alibi"}
_CACHE_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "int8": "int8"}


def one_tensor(case: Case) -> Case:
    """The case with keys and values in one tensor, which these classes take."""
    return dataclasses.replace(case, layout="2NHD") if case.layout == "NHD" and case.v_head_size is None else case


def refuses(case: Case) -> str | None:
    """Why none of the classes takes a case."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    if case.cache_dtype not in (None, case.dtype, *QUANTIZED):
        return "the classes write new tokens in their own dtype"
    if case.layout not in ("2NHD", "N2HD"):
        return "the classes take one tensor [2, num_blocks, ...] or a transposition of it"
    if case.scales == "token_head" or (case.cache_dtype == "int8" and case.scales is None):
        return "the classes take a scale per tensor or head"
    options = dict(case.options)
    unknown = set(options) - _OPTIONS
    if unknown:
        return f"the classes have no {', '.join(sorted(unknown))}"
    left, right = options.get("window") or (None, None)
    causal = options.get("causal", True)
    if (left is None and right is not None) or (right != left and not causal):
        return "the classes have windows that reach as far to both sides, or back alone"
    return None


def flex_refuses(case: Case) -> str | None:
    return refuses(case) or _head_size_refused(case)


def flash_refuses(case: Case) -> str | None:
    if case.extra_tokens or not dict(case.options).get("causal", True):
        return "the class has no rows without a request, and no encoders with a cache"
    return refuses(case) or _other_sizes(case)


def sdpa_refuses(case: Case) -> str | None:
    return "the class has no rows without a request" if case.extra_tokens else refuses(case) or _other_sizes(case)


def run_flex(inputs: Inputs) -> Any:
    """The output, without an lse."""
    import torch

    from jaxpaged.backends.flex import FlexAttentionImpl, FlexAttentionMetadata, physical_to_logical_mapping

    batch = _Batch(inputs, range(len(inputs.seq_lens)))
    impl = FlexAttentionImpl(**batch.settings, attn_type="decoder" if batch.causal else "encoder_only")
    num_blocks = batch.kv_cache.shape[1]
    metadata = FlexAttentionMetadata(
        num_actual_tokens=batch.num_tokens, max_query_len=0, query_start_loc=batch.starts, max_seq_len=0,
        seq_lens=batch.lens, block_table=batch.table, slot_mapping=batch.slots, use_cascade=False, common_prefix_len=0,
        cu_prefix_query_lens=None, prefix_kv_lens=None, suffix_kv_lens=None, block_size=inputs.case.block_size,
        total_cache_tokens=num_blocks * inputs.case.block_size, max_possible_sequence_length=0,
        num_reqs=len(batch.lens), physical_to_logical=physical_to_logical_mapping(batch.table, num_blocks),
        decode_offset=batch.lens - batch.starts.diff(),
    )  # fmt: skip
    output = torch.zeros_like(batch.query)
    impl.forward(batch.layer, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
    return output.double().numpy(), None


def run_flash(inputs: Inputs) -> Any:
    """Prompts first: the requests of another number of new tokens than one."""
    import torch

    from jaxpaged.backends.flash import FlashAttentionImpl, FlashAttentionMetadata

    new = np.diff(inputs.query_start_loc)
    batch = _Batch(inputs, np.argsort(new == 1, kind="stable"))
    num_prefills = int((new != 1).sum())
    split = int(batch.starts[num_prefills])
    metadata = FlashAttentionMetadata(
        num_prefills=num_prefills, num_prefill_tokens=split, num_decode_tokens=batch.num_tokens - split,
        slot_mapping=batch.slots, seq_lens=batch.lens.tolist(), seq_lens_tensor=batch.lens, max_query_len=0,
        max_prefill_seq_len=0, max_decode_seq_len=0, query_start_loc=batch.starts,
        seq_start_loc=torch.nn.functional.pad(batch.lens.cumsum(0).int(), (1, 0)),
        context_lens_tensor=batch.lens - batch.starts.diff(), block_tables=batch.table, use_cuda_graph=False,
    )  # fmt: skip
    impl = FlashAttentionImpl(**batch.settings)
    rows = (batch.query.flatten(1), batch.key.flatten(1), batch.value.flatten(1))
    out = impl.forward(*rows, batch.kv_cache, metadata, batch.layer._k_scale, batch.layer._v_scale)
    return batch.in_order(out)


def run_sdpa(inputs: Inputs) -> Any:
    """Decodes first: the requests of one new token; in an encoder there are none."""
    import torch

    from jaxpaged.backends.sdpa import TorchSDPABackendImpl, TorchSDPAMetadata

    one = np.diff(inputs.query_start_loc) == 1
    one &= bool(inputs.options.get("causal", True))
    batch = _Batch(inputs, np.argsort(~one, kind="stable"))
    d = int(one.sum())
    metadata = TorchSDPAMetadata(
        num_prefills=len(one) - d, num_prefill_tokens=batch.num_tokens - d, num_decode_tokens=d,
        slot_mapping=batch.slots, decode_seq_lens_tensor=batch.lens[:d], decode_max_seq_len=0,
        decode_block_tables=batch.table[:d], chunked_prefill=True, prefill_query_start_loc=batch.starts[d:] - d,
        prefill_seq_start_loc=torch.nn.functional.pad(batch.lens[d:].cumsum(0).int(), (1, 0)),
        prefill_block_tables=batch.table[d:],
    )  # fmt: skip
    impl = TorchSDPABackendImpl(**batch.settings, attn_type="decoder" if batch.causal else "encoder_only")
    rows = (batch.query.flatten(1), batch.key.flatten(1), batch.value.flatten(1))
    return batch.in_order(impl.forward(batch.layer, *rows, batch.kv_cache.flatten(2), metadata))


class _Batch:
    """A case's tensors with its requests in another order, and with its new tokens still to be written."""

    def __init__(self, inputs: Inputs, order: Any):
        import torch

        from jaxpaged.bridge.dlpack import to_torch

        case, starts = inputs.case, inputs.query_start_loc
        self._inputs = inputs
        ranges = [np.arange(starts[r], starts[r + 1]) for r in order]
        self._rows = np.concatenate([*ranges, np.arange(starts[-1], len(inputs.query))])
        lens = np.array([len(r) for r in ranges], np.int32)
        self.starts = torch.from_numpy(np.concatenate([np.zeros(1, np.int32), np.cumsum(lens, dtype=np.int32)]))
        self.num_tokens = int(starts[-1])
        self.lens = torch.from_numpy(inputs.seq_lens[list(order)])
        self.table = torch.from_numpy(inputs.block_table[list(order)])
        slots = inputs.slot_mapping[self._rows]
        self.slots = torch.from_numpy(slots)
        self.query = to_torch(inputs.query[self._rows])
        self.key, self.value = (
            to_torch(_rows_at(x, slots).astype(case.dtype)) for x in (inputs.key_values, inputs.value_values)
        )
        self.kv_cache = _unwritten(inputs, slots)
        scales = [torch.ones(()) if s is None else torch.from_numpy(s) for s in (inputs.k_scale, inputs.v_scale)]
        self.layer = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1])

    @property
    def causal(self) -> bool:
        return bool(self._inputs.options.get("causal", True))

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of a layer's constructor."""
        case, options = self._inputs.case, self._inputs.options
        left = (options.get("window") or (None, None))[0]
        scale = options.get("scale")
        return {
            "num_heads": case.num_heads, "head_size": case.head_size, "num_kv_heads": case.num_kv_heads,
            "scale": case.head_size**-0.5 if scale is None else scale, "alibi_slopes": options.get("alibi_slopes"),
            "sliding_window": None if left is None else left + 1, "logits_soft_cap": options.get("soft_cap"),
            "kv_cache_dtype": _CACHE_DTYPES.get(case.cache_dtype or "", "auto"),
        }  # fmt: skip

    def in_order(self, out: Any) -> Any:
        """Rows of the output in the case's order, without an lse."""
        result = np.zeros(self._inputs.query.shape)
        result[self._rows] = out.double().numpy().reshape(result.shape)
        return result, None


def _rows_at(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """What lies in the slots of values [num_blocks, block_size, ...]; 0 for tokens without one."""
    rows = values.reshape(-1, *values.shape[2:])[np.maximum(slots, 0)]
    return np.where((slots >= 0)[:, None, None], rows, 0)


def _unwritten(inputs: Inputs, slots: np.ndarray) -> Any:
    """The case's cache [2, num_blocks, block_size, ...] with poison in the slots of the new tokens."""
    from jaxpaged.bridge.dlpack import to_torch

    case = inputs.case
    buffer = aligned(inputs.key_buffer)
    cache = buffer if case.layout == "2NHD" else buffer.swapaxes(0, 1)
    blocks, offsets = np.divmod(slots[slots >= 0], case.block_size)
    cache[:, blocks, offsets] = 101 if case.cache_dtype == "int8" else np.nan
    tensor = to_torch(buffer)
    return tensor if case.layout == "2NHD" else tensor.transpose(0, 1)


def _head_size_refused(case: Case) -> str | None:
    from jaxpaged.backends.flex import FlexAttentionBackend

    supported = FlexAttentionBackend.get_supported_head_sizes()
    return None if case.head_size in supported else f"the class has no heads of {case.head_size}"


def _other_sizes(case: Case) -> str | None:
    """Calls in two parts need programs of their own, which cost seconds for each set of sizes."""
    usual = Case("usual", (), ())
    same = all(
        getattr(case, name) == getattr(usual, name) for name in ("num_heads", "num_kv_heads", "head_size", "block_size")
    )
    return None if same else "sizes count below the classes alone, and backend-flex goes through all of them"
