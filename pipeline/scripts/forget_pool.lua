#!lua flags=allow-oom
-- Removes what is left of a pool that is gone: guarantees that no entry is lost with it, and that it stays where a
-- process of it has announced itself meanwhile. A process that comes later finds everything as on its first start.
--
-- KEYS  index of pools, credits, then for each work stream: stream, claims, tries
-- ARGV  pool, epoch in ms of its last sign of life as the caller knows it
-- reply 1, or 0 if it stays
local pools, credits, pool = KEYS[1], KEYS[2], ARGV[1]
local seen_ms = redis.call('ZSCORE', pools, pool) -- none where it was forgotten a moment ago, and queues made again
if seen_ms and tonumber(seen_ms) ~= tonumber(ARGV[2]) then
  return 0
end
for i = 3, #KEYS, 3 do
  if redis.call('XLEN', KEYS[i]) > 0 then
    return 0
  end
end
for i = 2, #KEYS do
  redis.call('DEL', KEYS[i])
end
redis.call('ZREM', pools, pool)
return 1
