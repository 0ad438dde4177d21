"""The demonstration: a day of real flights as delayed tasks, checked against the data file.

The rules of the play, all computed from the file:

- Every flight's boarding call is due 30 minutes before its departure. It is scheduled 4 hours before the departure
  that was planned, or when the play begins.
- A delay becomes known one hour before the departure as then expected, so half an hour before the call. A long delay
  creeps, as real ones do: each notice adds an hour at most. Each notice schedules the call anew.
- A cancelled flight is cancelled one hour before the departure that was planned.
- A flight that left early is no news: it leaves because everybody is aboard, so its call was made as planned.
- The call that counts is 30 minutes before the departure as it was: planned plus delay, never before planned.

Time runs `speed` times faster. In the middle of it the agent is killed, and started again.
"""
