#!lua flags=allow-oom
-- Moves one entry to the dead stream: guarantees that it is in exactly one of the two, and that only its
-- holder moves it.
--
-- KEYS  stream, claims, tries, dead stream
-- ARGV  consumer, group, id, nonce, max_dead, ttl_s, payload, reason
-- reply 1, or 0 if it is lost
local stream, claims, tries, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local consumer, group, id, nonce = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local max_dead, ttl_s, payload, reason = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

-- include: held.lua

if not held(stream, claims, group, id, nonce, consumer) then
  return 0
end
redis.call('XADD', dead, 'MAXLEN', '~', max_dead, '*', 'p', payload, 'reason', reason, 'stream', stream,
  'entry', id, 'tries', redis.call('HGET', tries, id) or '0')
redis.call('EXPIRE', dead, ttl_s)
drop(stream, claims, tries, group, id)
return 1
