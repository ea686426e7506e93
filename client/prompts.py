"""The checks of prompts lie in `protos`: `Engine` uses them too."""

from allspan.protos.prompts import Params, checked_ids, params_list, parse_request_id, prompt_list, with_seed

__all__ = ["Params", "checked_ids", "params_list", "parse_request_id", "prompt_list", "with_seed"]
