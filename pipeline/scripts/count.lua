#!lua flags=allow-oom
-- Adds to counters: guarantees that what is sent twice after a lost reply is counted once.
--
-- KEYS  counters, ticket (names this call)
-- ARGV  ttl_s, ticket_ttl_s, then name and count of each
-- reply 1, or 0 if it was counted before
local counters, ticket = KEYS[1], KEYS[2]
if not redis.call('SET', ticket, '1', 'NX', 'EX', ARGV[2]) then
  return 0
end
for i = 3, #ARGV, 2 do
  redis.call('HINCRBY', counters, ARGV[i], ARGV[i + 1])
end
redis.call('EXPIRE', counters, ARGV[1])
return 1
