#!lua flags=allow-oom
-- Announces a process: guarantees that it is found in the index for as long as its announcement lasts, and that its
-- pool is known to be alive by the server's clock, which is the one that judges its age. With allow-oom: on a full
-- server the stages have to know of each other in order to drain it.
--
-- KEYS  registration, index of registrations, index of pools
-- ARGV  info, ttl_ms, member of the index, index_ttl_s, pool ('' for none), pools_ttl_s
-- reply 1
local registration, index, pools = KEYS[1], KEYS[2], KEYS[3]
redis.call('SET', registration, ARGV[1], 'PX', ARGV[2])
redis.call('SADD', index, ARGV[3])
redis.call('EXPIRE', index, ARGV[4])
if ARGV[5] ~= '' then
  local time = redis.call('TIME')
  redis.call('ZADD', pools, time[1] * 1000 + math.floor(time[2] / 1000), ARGV[5])
  redis.call('EXPIRE', pools, ARGV[6])
end
return 1
