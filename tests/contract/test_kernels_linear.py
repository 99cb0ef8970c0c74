"""Linear layers: every entry point of every implementation against float64."""

import ctypes

import pytest
import torch
from kernel_cases import assert_close, require_native

from kernels.linear.contract import GatedLinear, Linear
from kernels.linear.cpu import PackedGatedLinear, PackedLinear
from kernels.linear.reference import TorchGatedLinear, TorchLinear
from kernels.native.native_library import native_library

ROWS = (*range(1, 8), 15, 16, 17, 32, 33, 65, 100)
SHAPES = [(1, 1), (33, 17), (64, 48), (95, 63), (130, 129)]
DTYPES = [torch.float32, torch.bfloat16]


def linear(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    return TorchLinear(weight, bias) if name == "torch" else PackedLinear(_library(), weight, bias)


def gated(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> GatedLinear:
    return TorchGatedLinear(weight, bias) if name == "torch" else PackedGatedLinear(_library(), weight, bias)


def _library() -> ctypes.CDLL:
    require_native()
    library = native_library()
    assert library is not None
    return library


@pytest.fixture(params=["torch", "native"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def exact_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def scaled(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose products of a row stay around one."""
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_products_sums_and_float32_results_are_those_of_float64(
    name: str, dtype: torch.dtype, has_bias: bool, columns: int, depth: int
) -> None:
    weight, bias = scaled(columns, depth, dtype=dtype), torch.randn(columns).to(dtype) if has_bias else None
    layer = linear(name, weight, bias)
    for num_rows in ROWS:
        wide = torch.randn(num_rows, depth + 3).to(dtype)
        x, residual = wide[:, :depth], torch.randn(num_rows, columns).to(dtype)
        exact = exact_product(x, weight, bias)
        assert_close(layer(x), exact, dtype)
        assert_close(layer.add(x, residual), exact + residual.double(), dtype)
        in_float32 = layer.in_float32(x)
        assert in_float32.dtype == torch.float32
        assert_close(in_float32, exact, torch.float32 if name == "native" else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "depth"), [(1, 1), (17, 33), (48, 64), (95, 63)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_gate_of_both_halves_is_that_of_float64(
    name: str, dtype: torch.dtype, width: int, depth: int, has_bias: bool
) -> None:
    weight = scaled(2 * width, depth, dtype=dtype)
    bias = torch.randn(2 * width).to(dtype) if has_bias else None
    layer = gated(name, weight, bias)
    for num_rows in ROWS:
        x = torch.randn(num_rows, depth).to(dtype)
        gate, up = exact_product(x, weight, bias).chunk(2, dim=1)
        assert_close(layer(x), torch.nn.functional.silu(gate) * up, dtype)
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_the_weight_comes_back_exactly_whole_and_by_rows(
    name: str, dtype: torch.dtype, columns: int, depth: int
) -> None:
    weight = torch.randn(columns, depth).to(dtype)
    layer = linear(name, weight, None)
    indices = torch.randint(columns, (9,))
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.rows(indices), weight[indices])


def test_an_input_of_another_depth_is_refused(name: str) -> None:
    layer = linear(name, torch.randn(8, 16), None)
    with pytest.raises((ValueError, RuntimeError)):
        layer(torch.randn(2, 15))
