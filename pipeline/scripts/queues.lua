#!lua flags=no-writes
-- Looks at work streams.
--
-- KEYS  work streams
-- ARGV  handback consumer, then for each stream its group
-- reply for each stream the four numbers of queue_state.py, or '' where it is empty

-- include: queue_state.lua

local reply = {}
for i, stream in ipairs(KEYS) do
  local _, numbers = queue_state(stream, ARGV[i + 1], ARGV[1])
  reply[i] = numbers or ''
end
return reply
