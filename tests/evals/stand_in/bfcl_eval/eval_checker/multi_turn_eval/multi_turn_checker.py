from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call


def multi_turn_checker(said, truth, entry, category, model_name):
    for steps, calls in zip(said, truth, strict=True):
        if calls and not any(steps):
            return {"valid": False, "error_type": "multi_turn:empty_turn_model_response"}
        about = (entry["initial_config"], entry["involved_classes"])
        for step in steps:
            _, own = execute_multi_turn_func_call(step, *about, model_name, entry["id"], is_evaL_run=True)
        _, right = execute_multi_turn_func_call(calls, *about, model_name + "_truth", entry["id"], is_evaL_run=True)
        if calls and own["Desk"].places != right["Desk"].places:
            return {"valid": False, "error_type": "multi_turn:instance_state_mismatch"}
    return {"valid": True}
