"""load -> fuse -> check -> write: `optimize`, `inspect`, and the steps that sessions, passes and
commands share."""
