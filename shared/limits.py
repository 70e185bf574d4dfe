"""Pure: every bound that more than one part relies on, each with its reason; derived ones are asserted against each other."""

from __future__ import annotations

from typing import Final

MIB: Final = 1024 * 1024

# NATS: the server is configured to this; a 200,000-token prompt (0.8 MB packed, plus keys) fits ten times over.
PAYLOAD_BYTES_MAX: Final = 8 * MIB
# Headers and envelope around a body; what is left of the payload is the body's.
ENVELOPE_BYTES_MAX: Final = 64 * 1024
BODY_BYTES_MAX: Final = PAYLOAD_BYTES_MAX - ENVELOPE_BYTES_MAX

# An HTTP body. Agents send histories of 1 to 10 MB; what does not fit one NATS message is refused before it is parsed.
HTTP_BODY_BYTES_MAX: Final = 6 * MIB
assert HTTP_BODY_BYTES_MAX < BODY_BYTES_MAX, "a body the gateway accepts must fit one message to the loop"

# Turns waiting for a loop. Beyond it a caller is better served by 429 and its own back-off.
TURN_QUEUE_COUNT_MAX: Final = 1_000
# Generations waiting in the router; every turn has at most one.
GENERATE_QUEUE_COUNT_MAX: Final = 2_000
assert GENERATE_QUEUE_COUNT_MAX >= TURN_QUEUE_COUNT_MAX, (
    "a turn that was taken must not be refused by the router's queue"
)

# Heartbeats: silence of this many beats means gone.
HEARTBEAT_S: Final = 1.0
SILENT_AFTER_S: Final = 5.0
assert SILENT_AFTER_S >= 3 * HEARTBEAT_S, "one lost heartbeat must not look like a death"

# A worker pulls at least each second; the router gives its work away after this silence.
PULL_EVERY_S: Final = 1.0
PULL_SILENT_AFTER_S: Final = 2.5
# Whoever has a generation says so at least each second; the loop places it again after this silence.
GENERATE_SIGN_EVERY_S: Final = 1.0
GENERATE_SILENT_AFTER_S: Final = 3.5
assert GENERATE_SILENT_AFTER_S > PULL_SILENT_AFTER_S, "the router, which knows more, gets to say 'lost' first"

# JetStream gives a turn to another loop after this silence of the one that has it; it says 'in progress' at a third of it.
TURN_ACK_WAIT_S: Final = 4.0
TURN_DELIVERIES_MAX: Final = 20

# Longest a turn may take when the client names no deadline.
TURN_DEADLINE_S: Final = 600.0
TURN_DEADLINE_S_MAX: Final = 3_600.0

# A reply that takes longer is treated as lost; the services answer in milliseconds.
REQUEST_TIMEOUT_S: Final = 5.0

# Handlers of one subject that may run at once in one service; more are refused as overloaded.
HANDLERS_COUNT_MAX: Final = 256
# Messages that may wait in one subscription before the client library drops and reports a slow consumer.
SUBSCRIPTION_MESSAGES_MAX: Final = 65_536
SUBSCRIPTION_BYTES_MAX: Final = 64 * MIB

# SIGTERM to exit: work that has not ended by then is given up, and resumed by another replica.
DRAIN_S: Final = 10.0

# Records of one session read back in one go.
SESSION_RECORDS_MAX: Final = 100_000
