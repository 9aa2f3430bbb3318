"""Like the real one it keeps simulators among its globals, under the caller's name, and evaluates calls as Python."""

EVALUATED = []  # every call that was, for the tests


class Desk:
    def __init__(self, places):
        self.places = dict(places)

    def look(self):
        return dict(self.places)

    def put(self, item, shelf, weight=0.0, marks=()):
        if shelf > 9:
            raise ValueError("there are nine shelves")
        self.places[item] = shelf
        return f"{item} is on {shelf}"

    def _secret(self):
        raise AssertionError("private")


def execute_multi_turn_func_call(
    func_call_list, initial_config, involved_classes, model_name, test_entry_id, long_context=False, is_evaL_run=False
):
    assert involved_classes == ["Desk"] and not long_context
    name = f"{model_name}{'_eval' if is_evaL_run else ''}_{test_entry_id}_Desk_instance"
    desk = globals().setdefault(name, Desk(initial_config["Desk"]))
    results = []
    for call in func_call_list:
        EVALUATED.append(call)
        try:
            results.append(str(eval(call, {}, {"look": desk.look, "put": desk.put})))
        except (NameError, TypeError, ValueError) as error:
            results.append(f"Error during execution: {error}")
    return results, {"Desk": desk}
