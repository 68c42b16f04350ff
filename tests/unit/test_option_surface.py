"""For every option of flame-train, the test that shows that it changes what it says, or that it is refused.

An option without a line here fails, as does a line whose test is gone: so nothing is accepted and ignored unnoticed.
What every name is, with its default and its aliases, is pinned by tests/unit/test_train_config.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flame.cli.train import main
from flame.config import Option, options_of
from flame.errors import UsageError
from flame.train.config import TrainConfig, parse_train_config
from flame.train.refusals import NOT_AVAILABLE_YET

TESTS = Path(__file__).resolve().parents[1]
OPTIONS = {option.name: option for option in options_of(TrainConfig)}

_CONFIG, _OPTIONS = "unit/test_train_config.py", "integration/test_options.py"
_TOLD = f"{_OPTIONS}::test_options_of_saving_telling_and_reading_leave_the_numbers_alone"
_FIRST_LOSS = f"{_OPTIONS}::test_what_changes_the_first_loss"
_UPDATES = f"{_OPTIONS}::test_what_changes_updates_and_not_the_first_loss"
_REACHES = f"{_OPTIONS}::test_an_option_reaches_the_function_that_is_tested_by_itself"
_MOVED = f"{_CONFIG}::test_reading_text_is_answered_with_the_commands_to_type"
_SPELLINGS = f"{_CONFIG}::test_spellings"
_REFUSALS = "unit/test_refusals.py"
_DELAYED = f"{_REFUSALS}::test_delayed_scaling_is_refused_with_its_reason"
_LOGGERS, _WATCHDOG = "unit/test_loggers.py", "unit/test_watchdog.py"
_PLAN, _ASYNC = "integration/test_plan.py", "integration/test_async_saves.py"
_CASES, _CONTINUAL = "integration/test_cases.py", "integration/test_continual.py"
_EXACT, _EXPORT = "integration/test_training_exactness.py", "integration/test_training_export.py"
_ACTIVATIONS, _PARALLEL = "unit/test_activations.py", "unit/test_parallelize.py"
_CONSOLE = "integration/test_training_console.py::test_a_terminal_has_a_live_line_and_a_plain_one_has_none"
_ALL_RANKS_LOG = (
    "integration/test_training_loggers.py::test_a_logger_that_fails_does_not_stop_a_run_and_all_ranks_may_log"
)
_RANKS = "promises.py::two_ranks_then_one_then_more_train_the_same_samples"
_RATES = f"{_CASES}::test_the_learning_rate_is_the_closed_form_at_every_step_whatever_was_changed"

SHOWN: dict[str, tuple[str, ...]] = {
    "job.config_file": (f"{_CONFIG}::test_the_command_line_wins_over_the_file",),
    "job.dump_folder": ("integration/test_training_refusals.py::test_a_run_folder_that_cannot_be_one",),
    "job.description": (_TOLD,),
    "job.print_args": (_TOLD,),
    "job.use_for_integration_test": (_TOLD,),
    "job.dry_run": (f"{_PLAN}::test_a_plan_is_arithmetic_over_the_ranks_and_writes_nothing",),
    "job.dry_run_ranks": (f"{_PLAN}::test_a_plan_is_arithmetic_over_the_ranks_and_writes_nothing",),
    "model.config": ("integration/test_training_refusals.py::test_another_model_on_a_resume",),
    "model.tokenizer_path": (f"{_OPTIONS}::test_another_tokenizer_and_another_attention_are_refused",),
    "model.norm_type": (
        "unit/test_model_config.py::test_norm_types_of_fla",
        f"{_OPTIONS}::test_another_tokenizer_and_another_attention_are_refused",
    ),
    "model.trust_remote_code": ("unit/test_model_config.py::test_code_of_its_own_is_not_run_unasked", _REACHES),
    "model.attention": (f"{_OPTIONS}::test_another_tokenizer_and_another_attention_are_refused", _REACHES),
    "training.dataset": ("integration/test_mix_stages.py::test_a_run_resumes_onto_an_edited_mixture",),
    "training.data_probs": (f"{_PLAN}::test_a_plan_is_arithmetic_over_the_ranks_and_writes_nothing",),
    "training.source": ("integration/test_mix_stages.py::test_a_run_finds_a_corpus_that_was_moved",),
    "training.dataset_name": (_MOVED, f"{_CONFIG}::test_the_usual_call_of_the_predecessor"),
    "training.dataset_split": (_MOVED, f"{_CONFIG}::test_the_usual_call_of_the_predecessor"),
    "training.data_dir": (_MOVED,),
    "training.data_files": (_MOVED, f"{_CONFIG}::test_the_command_for_files_parses"),
    "training.streaming": (_MOVED, f"{_CONFIG}::test_streaming_false_is_fine"),
    "training.batch_size": (_RANKS, f"{_EXACT}::test_another_global_batch_draws_on_from_the_same_sample"),
    "training.seq_len": (_RANKS,),
    "training.context_len": (f"{_CASES}::test_a_forward_in_training_is_the_exported_models_on_each_sequence_alone",),
    "training.varlen": (_FIRST_LOSS, f"{_EXACT}::test_rows_without_document_masks"),
    "training.window_len": ("integration/test_training_refusals.py::test_other_data_on_a_resume",),
    "training.packing": ("integration/test_packed_run.py::test_a_run_over_packs_is_resumed_and_traced",),
    "training.tokens": (f"{_CONFIG}::test_tokens_are_rounded_up_to_steps",),
    "training.gradient_accumulation_steps": (f"{_EXACT}::test_ranks_and_accumulation_change_nothing",),
    "training.steps": (_RATES,),
    "training.max_norm": (_UPDATES, "unit/test_optimizer.py::test_as_torch_clips_scaled_gradients"),
    "training.skip_nan_inf": (
        f"{_EXACT}::test_an_update_that_is_not_finite_is_skipped_and_counted",
        f"{_EXACT}::test_without_leave_to_skip_a_nan_stops_the_run_and_saves_nothing",
    ),
    "training.num_workers": (_TOLD, _REACHES),
    "training.prefetch_factor": (_TOLD, _REACHES),
    "training.pin_memory": (_TOLD,),
    "training.persistent_workers": (_TOLD,),
    "training.data_parallel_replicate_degree": (
        "integration/test_layouts.py::test_what_four_ranks_do_in_any_layout_is_what_one_does",
        _REACHES,
    ),
    "training.data_parallel_shard_degree": (
        "integration/test_layouts.py::test_what_four_ranks_do_in_any_layout_is_what_one_does",
        _REACHES,
    ),
    "training.enable_cpu_offload": (
        "integration/test_optimizers.py::test_every_optimizer_resumes_to_the_last_bit",
        _REACHES,
    ),
    "training.fsdp_reshard_after_forward": (
        f"{_PARALLEL}::test_after_evaluation_parameters_are_shards_again",
        _REACHES,
    ),
    "training.mixed_precision_param": (_FIRST_LOSS,),
    "training.mixed_precision_reduce": ("unit/test_option_surface.py::test_gradients_are_summed_in_fp32_only",),
    "training.compile": (f"{_PARALLEL}::test_compiling_changes_no_value", _REACHES),
    "training.gc_freq": ("integration/test_garbage.py::test_garbage_is_collected_every_few_steps_and_not_in_between",),
    "training.seed": (_FIRST_LOSS,),
    "training.deterministic": (
        "unit/test_kernels_dispatch.py::test_deterministic_refuses_what_was_not_shown_to_be",
        _REACHES,
    ),
    "validation.dataset": (_TOLD,),
    "validation.freq": (_TOLD,),
    "validation.tokens": (_TOLD,),
    "optimizer.name": ("integration/test_optimizers.py::test_every_optimizer_resumes_to_the_last_bit",),
    "optimizer.lr": (_UPDATES, _RATES),
    "optimizer.beta1": (_UPDATES,),
    "optimizer.beta2": (_UPDATES,),
    "optimizer.eps": (_UPDATES,),
    "optimizer.weight_decay": (_UPDATES, _RATES),
    "optimizer.implementation": (
        "unit/test_optimizer.py::test_every_optimizer_and_implementation_makes_the_same_update",
    ),
    "optimizer.fused": (_SPELLINGS,),
    "optimizer.decay_all": (_UPDATES, "unit/test_optimizer.py::test_the_old_rule_decays_all"),
    "optimizer.lr_factors": (_UPDATES, "unit/test_optimizer.py::test_learning_rates_have_factors_by_parts_of_names"),
    "optimizer.muon_momentum": ("unit/test_optimizer.py::test_muon_is_torchs_to_the_last_bit",),
    "optimizer.muon_adjust_lr": ("unit/test_optimizer.py::test_muon_is_torchs_to_the_last_bit",),
    "optimizer.early_step_in_backward": (
        "integration/test_optimizers.py::test_updates_in_backward_are_those_after_it",
        f"{_REFUSALS}::test_updates_in_backward_are_refused_with_what_needs_the_whole_gradient",
    ),
    "optimizer.scheduler": (_SPELLINGS,),
    "lr_scheduler.warmup_steps": (_RATES,),
    "lr_scheduler.warmup_tokens": (f"{_CONFIG}::test_tokens_are_rounded_up_to_steps",),
    "lr_scheduler.decay_ratio": (_RATES, _UPDATES),
    "lr_scheduler.decay_type": ("unit/test_schedule.py::test_the_way_down_of_each_type", _UPDATES),
    "lr_scheduler.lr_min": (_UPDATES, "unit/test_schedule.py::test_up_flat_down"),
    "metrics.log_freq": (_CONSOLE,),
    "metrics.enable_tensorboard": (_ALL_RANKS_LOG,),
    "metrics.save_tb_folder": (f"{_LOGGERS}::test_ranks_but_the_first_log_to_tensorboard_only_and_only_if_asked",),
    "metrics.enable_wandb": (_ALL_RANKS_LOG, f"{_LOGGERS}::test_wandb_gets_the_run_and_its_steps"),
    "metrics.enable_trackio": (f"{_LOGGERS}::test_the_command_line_refuses_an_absent_package",),
    "metrics.peak_tflops": (_CONSOLE,),
    "metrics.disable_color_printing": (_CONSOLE,),
    "metrics.rank_0_only": (_ALL_RANKS_LOG,),
    "metrics.save_for_all_ranks": (_SPELLINGS,),
    "checkpoint.enable_checkpoint": (_TOLD,),
    "checkpoint.folder": (_TOLD,),
    "checkpoint.interval": (_TOLD,),
    "checkpoint.interval_type": (f"{_ASYNC}::test_the_interval_may_be_seconds_of_rank_0",),
    "checkpoint.load_step": (f"{_EXPORT}::test_a_resume_below_the_latest_moves_later_checkpoints_aside",),
    "checkpoint.keep_latest_k": (f"{_EXPORT}::test_a_resume_below_the_latest_moves_later_checkpoints_aside",),
    "checkpoint.exclude_from_loading": ("integration/test_exclusions.py::test_what_is_left_out_begins_anew",),
    "checkpoint.model_weights_only": (f"{_ASYNC}::test_the_last_save_may_hold_weights_only",),
    "checkpoint.export_dtype": (_TOLD,),
    "checkpoint.create_seed_checkpoint": (f"{_CONTINUAL}::test_a_seed_made_by_one_rank_starts_two",),
    "checkpoint.initial_load_path": (f"{_CONTINUAL}::test_a_run_begins_from_weights",),
    "checkpoint.initial_load_model_weights_only": (f"{_CONTINUAL}::test_a_whole_checkpoint_goes_on_elsewhere",),
    "checkpoint.export_hf": (_TOLD,),
    "checkpoint.fast_open": (f"{_OPTIONS}::test_a_damage_that_sizes_hide_passes_where_sizes_are_trusted",),
    "checkpoint.allow_data_change": (f"{_CONTINUAL}::test_changed_data_begin_a_segment_of_their_own",),
    "checkpoint.async_mode": (f"{_ASYNC}::test_a_slow_save_holds_what_was_staged_and_the_next_one_waits",),
    "activation_checkpoint.mode": (f"{_ACTIVATIONS}::test_a_run_computes_again_and_offloads", _REACHES),
    "activation_checkpoint.selective_ac_option": (f"{_ACTIVATIONS}::test_every_nth_block_is_computed_again", _REACHES),
    "activation_offload.mode": (
        f"{_ACTIVATIONS}::test_offloaded_activations_have_the_same_gradients",
        f"{_ACTIVATIONS}::test_a_run_computes_again_and_offloads",
    ),
    "float8.scaling_type_input": (_DELAYED,),
    "float8.scaling_type_weight": (_DELAYED,),
    "float8.scaling_type_grad_output": (_DELAYED,),
    "comm.init_timeout_seconds": (f"{_WATCHDOG}::test_a_collective_that_fails_tells_which_rank_to_look_at", _REACHES),
    "comm.train_timeout_seconds": (
        "integration/test_training_hangs.py::test_a_rank_that_hangs_is_named_with_its_stack",
        "integration/test_training_hangs.py::test_ranks_wait_long_only_until_the_first_step_of_each_start",
    ),
    "comm.shutdown_timeout_seconds": (_REACHES,),
    "comm.trace_buf_size": (f"{_OPTIONS}::test_the_flight_recorder_is_as_large_as_asked",),
    "profiling.enable_profiling": ("unit/test_profiling.py::test_the_last_step_of_each_period_is_traced",),
    "profiling.save_traces_folder": ("unit/test_profiling.py::test_the_last_step_of_each_period_is_traced",),
    "profiling.profile_freq": ("unit/test_profiling.py::test_the_last_step_of_each_period_is_traced",),
    "profiling.enable_memory_snapshot": (
        "unit/test_profiling.py::test_snapshots_tell_the_largest_tensors_of_a_period",
    ),
    "profiling.save_memory_snapshot_folder": (
        "unit/test_profiling.py::test_snapshots_tell_the_largest_tensors_of_a_period",
    ),
    "memory_estimation.enabled": (f"{_PLAN}::test_a_plan_is_arithmetic_over_the_ranks_and_writes_nothing",),
    "memory_estimation.disable_fake_mode": (f"{_PLAN}::test_real_tensors_are_watched_too_and_take_as_much",),
    "experimental.custom_model_path": ("unit/test_model_config.py::test_models_of_ones_own_are_found", _REACHES),
}
"""What has no engine yet is no part of this: each name of NOT_AVAILABLE_YET is refused by
test_refusals.py::test_what_has_no_engine_is_refused_by_name, and needs a line here once it has one."""

_REFUSED = f"{_REFUSALS}::test_what_has_no_engine_is_refused_by_name"


def test_every_option_is_shown_at_work_or_refused_by_name() -> None:
    assert sorted(SHOWN) == sorted(OPTIONS.keys() - {*NOT_AVAILABLE_YET})


@pytest.mark.parametrize("option", SHOWN)
def test_the_tests_that_are_named_are_there_and_one_speaks_of_the_option(option: str) -> None:
    texts = [_text_of(*test.split("::")) for test in SHOWN[option]]
    assert any(re.search(rf"(\b|_){OPTIONS[option].attribute}\b", text) for text in texts)
    assert "is not available yet" in _text_of(*_REFUSED.split("::"))


def _text_of(file: str, function: str) -> str:
    """Return the source of a test, with its decorators and what it uses of its module."""
    source = (TESTS / file).read_text("utf-8")
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            parts[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            parts[ast.unparse(target)] = node
    assert function in parts, f"{file} has no {function}"
    used = {name.id for name in ast.walk(parts[function]) if isinstance(name, ast.Name)}
    return "\n".join(ast.unparse(parts[name]) for name in {function} | used & parts.keys())


def test_gradients_are_summed_in_fp32_only() -> None:
    needed = ["--model.config=m", "--training.dataset=d"]
    with pytest.raises(UsageError, match=r"mixed_precision_reduce cannot be 'bfloat16' \(expected one of float32\)"):
        parse_train_config([*needed, "--training.mixed_precision_reduce=bfloat16"])


def test_the_reason_why_compiled_autograd_is_refused_still_holds() -> None:
    """Once this fails, FSDP2's gradients survive it, and experimental.enable_compiled_autograd can have its engine."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        layer = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
        loss = layer(torch.ones(2, 4)).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        assert not isinstance(layer.weight.grad, DTensor), "nothing has reduced it"
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()


def test_help_tells_each_option_in_its_section_with_unit_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    sections = {}
    for part in re.split(r"\n\n(?=\w+:\n)", capsys.readouterr().out)[1:]:
        name, _, text = part.partition(":\n")
        sections[name] = {
            re.match(r"--(\S+)", entry.strip())[1]: " ".join(entry.split())  # type: ignore[index]
            for entry in re.split(r"\n(?=  --)", "\n" + text.partition("\n\n")[0])
            if entry.strip()
        }
    assert list(sections) == list(dict.fromkeys(name.partition(".")[0] for name in OPTIONS))
    told = {name: text for entries in sections.values() for name, text in entries.items()}
    assert list(told) == list(OPTIONS)
    for name, option in OPTIONS.items():
        _told_whole(option, told[name])


def _told_whole(option: Option, told: str) -> None:
    """Check that the help of an option has its unit, choices, default and other names."""
    info = option.info
    facts = [info.unit and f"unit: {info.unit}", *(f"--{alias}" for alias in info.aliases)]
    facts += [info.choices and "one of " + ", ".join(info.choices)]
    if option.default not in (None, "", ()):
        value = f"{option.default:g}" if option.type is float else option.default
        facts.append(f"default: {({True: 'on', False: 'off'}[value]) if option.is_flag else value}")
    else:
        assert "default: " not in told
    facts.append(option.name in NOT_AVAILABLE_YET and "not available yet")
    for fact in facts:
        assert not fact or fact in told, (option.name, fact, told)
