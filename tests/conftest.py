"""Settings for all tests."""

import os

from hypothesis import HealthCheck, settings

# A busy machine must not fail a test, and a failure must be the same one next time.
settings.register_profile(
    "fa_compiler",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# HYPOTHESIS_PROFILE=explore draws new examples on every run, FA_COMPILER_EXAMPLES=20 twenty times as many
# (examples.py): for a longer search by hand.
settings.register_profile("explore", settings.get_profile("fa_compiler"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fa_compiler"))
