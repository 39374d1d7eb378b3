#!lua
-- Takes one sample: guarantees that of several samplers of a pool one samples at a time, and appends what each
-- work stream that has entries looks like. Without allow-oom: a full server needs its memory for the work.
--
-- KEYS  lock, samples, then the work streams
-- ARGV  sampler (its consumer name), lock_ms, max_samples, ttl_s, handback consumer, pool, what its KV field says,
--       then for each stream: its field, its group
-- reply 'taken' and the number of entries in all streams | 'elsewhere', 0
local lock, samples = KEYS[1], KEYS[2]
local sampler, lock_ms, max_samples, ttl_s, handback = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

-- include: queue_state.lua

if not redis.call('SET', lock, sampler, 'NX', 'PX', lock_ms) then
  if redis.call('GET', lock) ~= sampler then
    return { 'elsewhere', 0 }
  end
  redis.call('PEXPIRE', lock, lock_ms)
end

local fields, num_all = { 'pool', ARGV[6], 'kv', ARGV[7] }, 0
for i = 3, #KEYS do
  local field, group = ARGV[2 * i + 2], ARGV[2 * i + 3]
  local num_entries, numbers = queue_state(KEYS[i], group, handback)
  if numbers then
    num_all = num_all + num_entries
    fields[#fields + 1] = field
    fields[#fields + 1] = numbers
  end
end
redis.call('XADD', samples, 'MAXLEN', '~', max_samples, '*', unpack(fields))
redis.call('EXPIRE', samples, ttl_s)
return { 'taken', num_all }
