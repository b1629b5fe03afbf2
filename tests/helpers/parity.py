"""A reward for policies that solve nothing: half of all responses are right."""


def odd(data_source, response, ground_truth, extra):
    return len(response) % 2
