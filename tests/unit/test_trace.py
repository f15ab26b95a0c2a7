"""Where a step's time went, from made-up events."""

import json

import pytest

from bench.trace import Event, TraceSummary, events_of, ideal_of, kind_of, summarize

NAMES = {
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNT": "gemm",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>": "gemm",
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits>": "attention",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": "communication",
    "Memcpy DtoH (Device -> Pageable)": "copies",
    "Memcpy PtoP (Device -> Device)": "communication",
    "Memset (Device)": "copies",
    "_row_grad": "head rows",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float, c10::BFloat16>": "sharding copies",
    "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel": "sharding copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": "elementwise",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norm, rope, swiglu",
    "something_new": "other",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=range(len(NAMES)))
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def made_up() -> TraceSummary:
    """Ten seconds: a gemm of 4 with 1 of NCCL under it, 2 of NCCL that stick out, an idle one, attention, a copy."""
    events = [
        Event("nvjet_a", 100.0, 4.0, 7),
        Event("ncclDevKernel_AllGather", 103.0, 3.0, 9),  # 1 hidden, 2 exposed
        Event("nvjet_a", 107.0, 1.0, 7),  # after one idle second
        Event("flash_fwd", 108.0, 1.5, 7),
        Event("Memcpy HtoD", 109.5, 0.5, 7),
        Event("cudaStreamSynchronize", 100.0, 50.0, None),  # the host's time is no part of the step
        Event("cudaLaunchKernel", 100.0, 1.0, None),
    ]
    return summarize(events, {"gemm": 3.5, "attention": 1.25})


def test_every_instant_counts_once() -> None:
    found = made_up()
    assert found.step == pytest.approx(10.0)
    assert found.by_kind == pytest.approx(
        {"gemm": 5.0, "communication": 3.0, "attention": 1.5, "copies": 0.5}
    )
    assert (found.exposed, found.copying, found.idle) == pytest.approx((2.0, 0.5, 1.0))
    assert (found.gaps, found.waits) == (1, 1)
    assert found.longest_gap == pytest.approx(1.0)


def test_losses_and_the_ideal_are_the_step() -> None:
    found = made_up()
    assert [loss.name for loss in found.losses] == [
        "exposed communication", "gemm", "idle", "copies alone", "attention",
    ]  # fmt: skip
    assert [loss.seconds for loss in found.losses] == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.25])
    assert sum(loss.seconds for loss in found.losses) + sum(found.ideal.values()) == pytest.approx(
        found.step
    )
    assert found.losses[0].share == pytest.approx(0.2)


def test_kernels_are_summed_by_name() -> None:
    first = made_up().kernels[0]
    assert (first.name, first.kind, first.calls) == ("nvjet_a", "gemm", 2)
    assert first.seconds == pytest.approx(5.0)


def test_kernels_of_two_streams_do_not_hide_a_gap_that_neither_covers() -> None:
    found = summarize([Event("a", 0.0, 5.0, 1), Event("b", 1.0, 1.0, 2), Event("c", 6.0, 1.0, 2)])
    assert (found.step, found.idle, found.gaps) == pytest.approx((7.0, 1.0, 1))


def test_nothing_ran() -> None:
    found = summarize([])
    assert (found.step, found.losses[0].share) == (0.0, 0.0)


def test_shown_and_stored() -> None:
    found = made_up()
    assert "exposed communication                       2000.0" in found.table()
    told = json.loads(json.dumps(found.as_dict()))
    assert told["losses"][0]["seconds"] == pytest.approx(2.0)
    assert TraceSummary.of_dict(told) == found and found.waiting == pytest.approx(3.0)


def test_ideal_is_flops_over_rate() -> None:
    assert ideal_of({"gemm": (1444e12, 722e12)}) == {"gemm": pytest.approx(2.0)}


def test_events_of_a_chrome_trace() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "k", "ts": 2e6, "dur": 5e5, "args": {"stream": 7}},
            {
                "ph": "X",
                "cat": "gpu_memset",
                "name": "Memset (Device)",
                "ts": 3e6,
                "dur": 1e6,
                "args": {"stream": 7},
            },
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": 1e6,
                "dur": 1.0,
                "tid": 3,
            },
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1e6, "dur": 1.0},
            {"ph": "M", "name": "process_name", "args": {}},
        ]
    }
    assert list(events_of(trace)) == [
        Event("k", 2.0, 0.5, 7), Event("Memset (Device)", 3.0, 1.0, 7), Event("cudaLaunchKernel", 1.0, 1e-6, None),
    ]  # fmt: skip
