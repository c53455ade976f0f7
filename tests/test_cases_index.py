"""Which test proves which of the reported cases: reduction, missing pieces, numerics, shapes, hooks, costs."""

import pytest
from listed import missing

CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "K1": {
        "C01": ("test_tracker_ranks::test_a_shard_is_not_the_layer_and_a_replica_counts_once",),
        "C06": (
            "test_tracker_ranks::test_parameters_on_two_meshes",
            "test_cases_k1::test_c06_the_total_of_two_meshes",
        ),
        "C07": ("test_cases_k1::test_c07_the_total_of_a_sharded_and_a_plain_parameter",),
        "C09": (
            "test_cases_k1::test_c09_ranks_with_other_keys",
            "test_cases_k1::test_a_gradient_that_one_rank_lacks",
        ),
        "C10": ("test_tracker_ranks::test_ranks_that_list_their_parameters_in_another_order",),
        "C12": ("test_cases_k1::test_c12_gradients_are_those_that_ddp_has_averaged",),
        "C16": ("test_tracker_ranks::test_sums_travel_wider_than_the_parameters",),
        "C17": ("test_tracker_ranks::test_a_shard_is_not_the_layer_and_a_replica_counts_once",),
    },
    "K2": {
        "C19": (
            "test_optimizers_sharded_rules::test_local_scope_selects_from_every_shard_and_nothing_from_an_empty_one",
            "test_tracker_ranks::test_selected_rows_are_counted_from_real_rows",
        ),
        "C22": (
            "test_optimizers_sharded_rules::test_global_scope_selects_the_same_6_of_17_rows_on_any_number_of_ranks",
            "test_tracker_ranks::test_selected_rows_are_counted_from_real_rows",
        ),
        "C25": ("test_cases_k2::test_c25_matrices_of_one_row_under_fsdp2",),
        "C26": (
            "test_tracker_ranks::test_a_declared_shape_that_the_pieces_contradict",
            "test_layout::test_ranks_that_infer_other_global_shapes_are_refused_by_name",
        ),
        "C27": ("test_tracker_steps::test_a_head_that_is_never_used",),
    },
    "K3": {
        "C28": ("test_cases_k3::test_c28_c29_one_entry_that_is_not_finite",),
        "C29": ("test_cases_k3::test_c28_c29_one_entry_that_is_not_finite",),
        "C30": ("test_cases_k3::test_c30_bf16_weights_have_every_metric_and_a_histogram",),
        "C35": (
            "test_selection_functions::test_bfloat16_rows_do_not_saturate",
            "test_metrics_selection::test_bfloat16_scores_do_not_saturate",
        ),
        "C40": ("test_cases_k3::test_c40_ratios_of_singular_values_of_deficient_matrices",),
        "C41": ("test_cases_k3::test_c41_distributions_of_a_large_layer",),
        "C42": (
            "test_cases_k3::test_c42_histograms_of_what_is_not_finite",
            "test_sinks_wandb_histograms::test_consecutive_bins_without_zeros_and_what_is_not_finite",
        ),
        "C43": ("test_cases_k3::test_c43_the_spectral_norm_is_no_eigenvalue",),
        "C44": ("test_cases_k3::test_c44_complex_parameters_are_refused_by_name",),
        "C46": ("test_metrics_norms::test_shape_factors_are_not_rounded_in_the_dtype_of_the_weight",),
    },
    "K4": {
        "C49": (
            "test_groups::test_step_with_a_layer_scale_is_that_of_a_vector",
            "test_cases_k4::test_c49_a_gain_of_three_dimensions_is_a_vector",
        ),
        "C50": ("test_cases_k4::test_c50_a_kernel_is_one_matrix_for_rule_and_telemetry",),
        "C54": (
            "test_cases_k4::test_c54_fused_heads_are_selected_from_each_for_itself",
            "test_torch_groups::test_heads_are_stepped_as_a_loop_over_them",
        ),
        "C57": ("test_cases_k4::test_c57_interleaved_rows_are_no_option_and_asking_for_them_says_so",),
        "C58": (
            "test_cases_k4::test_c58_a_tied_weight_is_one_row_and_counts_once",
            "test_optimizers::test_duplicates_are_refused",
        ),
        "C59": ("test_cases_k1::test_c59_tied_copies_on_two_stages_count_once",),
        "C60": (
            "test_groups::test_a_pattern_that_matches_nothing_is_an_error_that_lists_the_names",
            "test_groups::test_a_pattern_that_never_comes_first_is_an_error_too",
            "test_groups::test_the_table_shows_every_parameter_once_and_prints",
        ),
        "C61": (
            "test_groups::test_options_of_roles_and_overrides_survive_into_the_optimizer",
            "test_cases_k4::test_c61_options_of_the_callers_groups_are_in_the_rows",
        ),
        "C63": ("test_cases_k4::test_c63_no_rule_scales_the_rate_of_the_head_behind_the_callers_back",),
    },
    "K6": {
        "C81": (
            "test_tracker_ways::test_a_closure_is_one_step",
            "test_optimizers::test_closures_are_called_once_with_gradients",
        ),
        "C84": ("test_tracker_wrappers::test_a_copy_steps_alike_and_is_not_tracked",),
        "C85": (
            "test_cases_k6::test_c85_a_container_steps_once",
            "test_tracker_ways::test_a_step_around_a_step_is_one_step",
        ),
        "C92": (
            "test_cases_k6::test_c92_the_rate_is_that_of_the_step_and_not_of_the_next_one",
            "test_tracker_ways::test_the_update_follows_the_learning_rate_of_its_own_step",
        ),
        "C93": ("test_tracker_growth::test_a_group_that_is_added_at_step_3",),
        "C94": (
            "test_cases_k6::test_c94_frozen_parameters_and_empty_groups",
            "test_cases_k6::test_c94_everything_that_is_a_matrix_is_frozen",
            "test_optimizers::test_frozen_parameters_and_empty_groups",
        ),
        "C95": (
            "test_tracker_wrappers::test_a_compiled_step_method_is_measured",
            "test_tracker_ways::test_a_compiled_step_is_measured_and_compiled_no_more_than_without",
        ),
        "C96": (
            "test_tracker_wrappers::test_attached_twice_for_two_steps_of_four",
            "test_tracker_invariants::test_hooks_are_gone_after_close_detach_and_an_exception",
        ),
    },
    "K11": {
        "C146": ("test_tracker_cost::test_the_host_reads_nothing_off_schedule_and_on_it_no_more_for_more_layers",),
        "C148": ("test_cases_k11::test_c148_no_matrix_is_gathered_to_be_measured",),
        "C150": ("test_tracker_cost::test_memory_does_not_grow",),
        "C152": (
            "test_cases_k11::test_c152_a_metric_that_fails_on_one_rank_stops_nothing",
            "test_writer::test_a_failing_sink_is_isolated_and_reported_when_it_fails_and_when_it_recovers",
        ),
        "C155": (
            "test_cases_k11::test_c155_steps_in_inference_mode",
            "test_tracker_globals::test_global_settings_do_not_leak_in",
            "test_tracker_globals::test_global_settings_do_not_leak_in_on_two_ranks",
        ),
    },
}
COUNTS = {"K1": 8, "K2": 5, "K3": 10, "K4": 9, "K6": 8, "K11": 5}


@pytest.mark.parametrize("kind", CASES)
def test_every_case_has_a_test_that_is_there(kind: str) -> None:
    assert len(CASES[kind]) == COUNTS[kind]
    assert [entry for tests in CASES[kind].values() for entry in tests if missing(entry)] == []
    assert all(CASES[kind].values())
