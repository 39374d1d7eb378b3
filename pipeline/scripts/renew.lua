#!lua flags=allow-oom
-- Renews leases: guarantees that only the holder's own nonce extends a lease. A plain XCLAIM would let a
-- process that was stopped and resumed steal its entry back from whoever took it over.
--
-- KEYS  for each delivery: stream, claims
-- ARGV  consumer, then for each delivery: group, id, nonce
-- reply for each delivery 1, or 0 if it is lost
local consumer = ARGV[1]
local reply = {}

-- include: held.lua

for i = 1, #KEYS / 2 do
  local stream, claims = KEYS[2 * i - 1], KEYS[2 * i]
  local group, id, nonce = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1]
  local mine = held(stream, claims, group, id, nonce, consumer)
  -- JUSTID: no payload comes back and the server's own delivery count stays.
  mine = mine and #redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID') == 1
  reply[i] = mine and 1 or 0
end
return reply
