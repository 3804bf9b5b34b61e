"""Launches fused linear layers with LoRA (up to 128 rows), and only LoRA after a cuBLAS product (up to 256 rows)."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lorax_server.kernels.hopper.arguments import (
    ITEM_RANKS,
    MAP_BYTES,
    MAX_SLICES,
    PART_RANKS,
    PLAN_THREADS,
    THREADS,
    LinearArgs,
    PlanArgs,
    RoundArgs,
)
from lorax_server.kernels.hopper.driver import Kernels, lora_factor_maps, matrix_map, slabs_map
from lorax_server.kernels.hopper.linear_settings import (
    LinearLaunchSetting,
    QuantizedLaunchSetting,
    find_quantized_setting,
    find_setting,
)
from lorax_server.kernels.hopper.packed import PackedMatrix
from lorax_server.kernels.hopper.sources import (
    HEIGHTS,
    ROUND_THREADS,
    STEP_INPUTS,
    AddLoraVariant,
    DequantizeVariant,
    LinearVariant,
    PackedFormat,
    PlanVariant,
    QuantizedVariant,
    RoundVariant,
    UnpackVariant,
    Variant,
)
from lorax_server.kernels.ops import MAX_RANK, LinearWeights, LoraBatch, LoraTarget

MAX_ROWS = PLAN_THREADS
MAX_PARTS = MAX_RANK // PART_RANKS
RECORD_BYTES = 32
WIDE_RING_BYTES = 150000  # with a larger ring, the LoRA blocks use wider stages


@dataclass(frozen=True)
class LoraPlan:
    """A batch's LoRA tiles and work items, at fixed device addresses."""

    rows: int
    records: torch.Tensor  # [targets, rows], one record per tile
    items: torch.Tensor  # [targets, max_items] shrink work items of 16 ranks
    parts: torch.Tensor  # [targets, max_parts] expand work items of 64 ranks
    num_items: torch.Tensor
    num_parts: torch.Tensor
    num_tiles: torch.Tensor
    flags: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, num_targets: int, device: torch.device) -> "LoraPlan":
        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            rows,
            empty(num_targets, rows, RECORD_BYTES, dtype=torch.uint8),
            empty(num_targets, rows * MAX_RANK // ITEM_RANKS),
            empty(num_targets, rows * MAX_PARTS),
            empty(num_targets),
            empty(num_targets),
            empty(1),
            empty(num_targets, rows, dtype=torch.uint8),
        )


class FusedLinear:
    """Launches linear layers on one device, and owns their shared scratch memory.

    All launches share the counters, V (the product `x @ A.T`) and D (the LoRA output), so only one step may run at a
    time, on one stream.
    """

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        device = kernels.device
        self.device, self.dtype = device, dtype
        self.num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
        self._kernels = kernels
        self._weight_maps: dict[LinearWeights, bytes] = {}
        self._factor_maps: dict[tuple[int, int, int, int], bytes] = {}
        self.deltas: dict[int, torch.Tensor] = {}
        self.counters = torch.zeros(3, dtype=torch.int32, device=device)
        self.low_rank = torch.empty(MAX_ROWS, MAX_SLICES * MAX_RANK, dtype=dtype, device=device)

    def supports(self, weights: LinearWeights, targets: Sequence[LoraTarget]) -> bool:
        """Return True if these kernels support this layer. If its matrix is quantized but not packed, only the LoRA
        kernels are used.
        """
        outputs, inputs = weights.shape
        widths = [target.columns.stop - target.columns.start for target in targets] or [outputs]
        return (
            weights.weight.dtype == self.dtype
            and (weights.is_quantized or weights.plain.is_contiguous())
            and inputs % 8 == 0
            and inputs >= 64
            and len(widths) <= MAX_SLICES
            and sum(widths) == outputs
            and all(width % 8 == 0 for width in widths)
        )

    def can_add_lora(self, out: torch.Tensor, targets: Sequence[LoraTarget]) -> bool:
        """Return True if `add_lora` supports `out` and these targets. The targets must start at the first column."""
        widths = [target.columns.stop - target.columns.start for target in targets]
        return (
            targets[0].columns.start == 0
            and len(widths) <= MAX_SLICES
            and all(width % 8 == 0 for width in widths)
            and out.stride(1) == 1
            and out.stride(0) % 8 == 0
        )

    def variants(self, inputs: int, outputs: int, with_lora: bool) -> set[Variant]:
        """Return the kernel variants that a linear layer needs for all batch sizes."""
        variants: set[Variant] = {PlanVariant(), AddLoraVariant(self.dtype)} if with_lora else set()
        for height in HEIGHTS:
            setting = find_setting(inputs, outputs, height, self.num_sms)
            variants |= {self._variant(height, setting, lora) for lora in {False, with_lora}}
        return variants

    def quantized_variants(self, matrix: PackedMatrix, with_lora: bool) -> set[Variant]:
        """Return the kernel variants that a quantized layer needs for all batch sizes."""
        (outputs, inputs), packed = matrix.shape, matrix.format
        variants: set[Variant] = {DequantizeVariant(self.dtype, packed)}
        for height in HEIGHTS:
            setting = find_quantized_setting(packed, inputs, outputs, height, self.num_sms)
            variants |= {self._quantized_variant(packed, height, setting, lora) for lora in {False, with_lora}}
        return variants

    def rounding_variants(self) -> set[Variant]:
        """Return the additional kernel variants of layers that round activations."""
        return {UnpackVariant(), *(RoundVariant(self.dtype, is_wide) for is_wide in (False, True))}

    def plan(self, lora: LoraBatch) -> LoraPlan:
        return lora.cached("fused plan", lambda: self._make_plan(lora))

    def refresh_plan(self, lora: LoraBatch) -> None:
        """Update the batch's LoRA plan in place, for its current adapters."""
        plan, num_targets = self.plan(lora), lora.table.shape[1]
        args = PlanArgs(
            lora.adapter_indices.data_ptr(),
            lora.table.data_ptr(),
            lora.scales.data_ptr(),
            plan.records.data_ptr(),
            plan.items.data_ptr(),
            plan.parts.data_ptr(),
            plan.num_items.data_ptr(),
            plan.num_parts.data_ptr(),
            plan.num_tiles.data_ptr(),
            plan.flags.data_ptr(),
            plan.rows,
            plan.rows,
            num_targets,
            plan.items.shape[1],
            plan.parts.shape[1],
        )
        self._kernels.get(PlanVariant()).launch(num_targets, PLAN_THREADS, [args], early=False)

    def _make_plan(self, lora: LoraBatch) -> LoraPlan:
        plan = LoraPlan.allocate(len(lora.adapter_indices), lora.table.shape[1], self.device)
        lora.derived["fused plan"] = plan
        self.refresh_plan(lora)
        return plan

    def linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
        setting: LinearLaunchSetting | None = None,
    ) -> torch.Tensor:
        """Return the linear layer's output for up to 128 rows, with adapters applied."""
        (outputs, inputs), height = weights.shape, find_height(len(x))
        setting = setting or find_setting(inputs, outputs, height, self.num_sms)
        variant = self._variant(height, setting, lora is not None)
        if weights not in self._weight_maps:
            self._weight_maps[weights] = matrix_map(weights.plain, 128)
        matrix = ctypes.create_string_buffer(self._weight_maps[weights], MAP_BYTES)
        out = torch.empty(len(x), outputs, dtype=self.dtype, device=self.device)
        args = self._make_fused_args(out, x, weights, lora, targets, variant.ring_bytes)
        args.lora_blocks = setting.lora_blocks
        args.steps = math.ceil(math.ceil(inputs / 64) / setting.cluster)
        args.early = setting.early if lora is None else setting.early_with_lora
        inputs_map = matrix_map(x, height)
        blocks = -(-outputs // 128) * setting.cluster
        self._launch(variant, blocks, matrix, inputs_map, args)
        return out

    def quantized_linear(
        self,
        x: torch.Tensor,
        weights: LinearWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
        setting: QuantizedLaunchSetting | None = None,
    ) -> torch.Tensor:
        """Return a quantized layer's output with adapters applied, for up to 128 rows. Without adapters, there can be
        more rows, which the kernel multiplies in groups of 128.
        """
        assert lora is None or len(x) <= HEIGHTS[-1]
        matrix = weights.weight
        assert isinstance(matrix, PackedMatrix)
        outputs, inputs = weights.shape
        out = torch.empty(len(x), outputs, dtype=self.dtype, device=self.device)
        factors, row_scales = x, None  # the product's inputs; LoRA always reads `x`
        if weights.rounds_inputs:
            factors, row_scales = self.round_rows(x, self.dtype)
        for start in range(0, len(x), HEIGHTS[-1]):
            x_part, out_part, factors_part = (each[start : start + HEIGHTS[-1]] for each in (x, out, factors))
            height = find_height(len(x_part))
            used = setting or find_quantized_setting(matrix.format, inputs, outputs, height, self.num_sms)
            variant = self._quantized_variant(matrix.format, height, used, lora is not None)
            args = self._make_fused_args(out_part, x_part, weights, lora, targets, variant.ring_bytes)
            args.row_scales = 0 if row_scales is None else row_scales[start:].data_ptr()
            args.lora_blocks = used.lora_blocks
            args.early = used.early if lora is None else used.early_with_lora
            args.steps = math.ceil(math.ceil(inputs / STEP_INPUTS) / used.cluster)
            blocks = -(-outputs // variant.columns) * used.cluster
            self._launch(variant, blocks, matrix.argument, slabs_map(factors_part, height), args)
        return out

    def round_rows(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Round activations to 8-bit floats. Return the values in `dtype` (without loss), and a scale per row."""
        values = torch.empty(x.shape, dtype=dtype, device=self.device)
        scales = torch.empty(len(x), dtype=torch.float32, device=self.device)
        args = RoundArgs(x.data_ptr(), values.data_ptr(), scales.data_ptr(), x.shape[1])
        variant = RoundVariant(self.dtype, is_wide=dtype == self.dtype)
        self._kernels.get(variant).launch(len(x), ROUND_THREADS, [args], early=True)
        return values, scales

    def can_multiply_float8(self, matrix: PackedMatrix) -> bool:
        """Return True if `float8_linear` supports this matrix. torch's product requires these dtypes and sizes."""
        return self.dtype == torch.bfloat16 and matrix.shape[0] % 16 == 0 and matrix.shape[1] % 16 == 0

    def float8_linear(self, x: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
        """Return the layer's output without adapters, for weights and activations that are rounded to 8-bit floats.
        The weights are unpacked to temporary memory.
        """
        assert isinstance(weights.weight, PackedMatrix)
        values, row_scales = self.round_rows(x, torch.float8_e4m3fn)
        matrix, scales = weights.weight.unpack_float8()
        out = torch._scaled_mm(
            values,
            matrix.t(),
            scale_a=row_scales[:, None],
            scale_b=scales[None],
            out_dtype=self.dtype,
            use_fast_accum=True,
        )
        return out if weights.bias is None else out.add_(weights.bias)

    def _make_fused_args(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weights: LinearWeights,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
        ring_bytes: int,
    ) -> LinearArgs:
        width = 1024 if ring_bytes > WIDE_RING_BYTES else 512
        args = self._make_args(out, x, weights.bias, lora, targets, width)
        args.d = 0 if lora is None else self.reserve_deltas(out.shape[1]).data_ptr()
        return args

    def _launch(
        self,
        variant: LinearVariant | QuantizedVariant,
        blocks: int,
        matrix: ctypes.Structure | ctypes.Array[Any],
        inputs_map: bytes,
        args: LinearArgs,
    ) -> None:
        inputs = ctypes.create_string_buffer(inputs_map, MAP_BYTES)
        blocks += args.lora_blocks if variant.with_lora else 0
        self._kernels.get(variant).launch(blocks, THREADS, [matrix, inputs, args], early=args.early > 0)

    def add_lora(
        self, out: torch.Tensor, x: torch.Tensor, lora: LoraBatch, targets: Sequence[LoraTarget], early: int = 0
    ) -> None:
        """Add LoRA to `out`, a cuBLAS product with up to 256 rows."""
        args = self._make_args(out, x, None, lora, targets, 1024)
        args.lora_blocks, args.early = self.num_sms, early
        self._kernels.get(AddLoraVariant(self.dtype)).launch(self.num_sms, THREADS, [args], early=early > 0)

    def _make_args(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        lora: LoraBatch | None,
        targets: Sequence[LoraTarget],
        width: int,
    ) -> LinearArgs:
        args = LinearArgs(x=x.data_ptr(), y=out.data_ptr(), bias=0 if bias is None else bias.data_ptr())
        args.K, args.x_stride, args.y_stride, args.M = x.shape[1], x.stride(0), out.stride(0), len(x)
        args.N[0], args.slices = out.shape[1], 1
        if lora is None:
            return args
        plan, first = self.plan(lora), targets[0].index
        widths = [target.columns.stop - target.columns.start for target in targets]
        maps = [self._factor_maps_for(lora.buffer, stride, width) for stride in (x.shape[1], *widths)]
        ctypes.memmove(ctypes.addressof(args), b"".join(maps), len(maps) * 2 * MAP_BYTES)  # maps for A, then B
        args.N[: len(widths)], args.slices = widths, len(widths)
        args.buffer, args.table = lora.buffer.data_ptr(), lora.table.data_ptr()
        args.adapters, args.v = lora.adapter_indices.data_ptr(), self.low_rank.data_ptr()
        args.items, args.records = plan.items[first].data_ptr(), plan.records[first].data_ptr()
        args.parts, args.num_tiles = plan.parts[first].data_ptr(), plan.num_tiles.data_ptr()
        args.num_items, args.num_parts = plan.num_items[first:].data_ptr(), plan.num_parts[first:].data_ptr()
        args.flags, args.counters = plan.flags[first].data_ptr(), self.counters.data_ptr()
        args.T, args.max_items, args.max_parts = plan.rows, plan.items.shape[1], plan.parts.shape[1]
        args.target, args.num_targets = first, lora.table.shape[1]
        return args

    def reserve_deltas(self, outputs: int) -> torch.Tensor:
        """Return the LoRA output buffer D, which all linear layers with this number of outputs share."""
        if outputs not in self.deltas:
            self.deltas[outputs] = torch.empty(MAX_PARTS * HEIGHTS[-1], outputs, dtype=self.dtype, device=self.device)
        return self.deltas[outputs]

    def _factor_maps_for(self, buffer: torch.Tensor, stride: int, width: int) -> bytes:
        key = (buffer.data_ptr(), buffer.numel(), stride, width)
        if key not in self._factor_maps:
            self._factor_maps[key] = lora_factor_maps(buffer, stride, width)
        return self._factor_maps[key]

    def _variant(self, height: int, setting: LinearLaunchSetting, with_lora: bool) -> LinearVariant:
        return LinearVariant(self.dtype, height, setting.stages, setting.cluster, with_lora)

    def _quantized_variant(
        self, packed: PackedFormat, height: int, setting: QuantizedLaunchSetting, with_lora: bool
    ) -> QuantizedVariant:
        return QuantizedVariant(self.dtype, packed, height, *setting[:4], with_lora)


def find_height(rows: int) -> int:
    """Return the height of the kernel variant for a number of rows, up to 128."""
    return next(height for height in HEIGHTS if rows <= height)
