"""Options of Ascend's own `atc` that users give to `fa-compiler atc`, and what to do with each."""

from __future__ import annotations

SET = ("framework", "input_format", "mode")
INSTEAD = {
    "precision_mode": "--precision",
    "precision_mode_v2": "--precision",
    "dynamic_batch_size": "--dynamic-dims",
    "dynamic_image_size": "--dynamic-dims",
    "input_shape_range": "--input-shape",
    "singleop": "the command fa-compiler single-op",
}
PASSED = (
    *(
        "atomic_clean_policy",
        "buffer_optimize",
        "check_report",
        "compression_optimize_conf",
        "customize_dtypes",
    ),
    *(
        "debug_dir",
        "deterministic",
        "disable_reuse_memory",
        "enable_single_stream",
        "enable_small_channel",
    ),
    *(
        "external_weight",
        "fusion_switch_file",
        "host_env_cpu",
        "host_env_os",
        "input_fp16_nodes",
        "insert_op_conf",
    ),
    *(
        "keep_dtype",
        "log",
        "modify_mixlist",
        "op_compiler_cache_dir",
        "op_compiler_cache_mode",
        "op_debug_config",
    ),
    *(
        "op_debug_level",
        "op_precision_mode",
        "op_select_implmode",
        "optypelist_for_implmode",
        "out_nodes",
    ),
    *(
        "output_type",
        "save_original_model",
        "sparsity",
        "status_check",
        "tiling_schedule_optimize",
        "virtual_type",
    ),
)


def told(word: str) -> str | None:
    """What to do with an option of `atc`, given as on the command line; None for any other word."""
    name = word.partition("=")[0].removeprefix("--").replace("-", "_")
    if name in SET:
        return "atc.sh sets this option of ATC"
    if name in INSTEAD:
        return f"give {INSTEAD[name]} instead"
    if name in PASSED:
        return "it is an option of ATC: give it to atc.sh, which passes it on"
    return None
