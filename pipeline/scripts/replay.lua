#!lua flags=allow-oom
-- Gives the request of a dead letter another life: guarantees that the letter goes and the request comes in one step;
-- that nothing is touched of a request that runs, or that had a later life than the letter's; that a batch has
-- collected the failure of its line before it is gone; and that it meets the same door as every request. What is left
-- of the old life in other streams has a smaller attempt, and is refused.
--
-- KEYS  dead stream, request, results, tokenizer stream, prefill stream, and again the one of these two that it goes to
-- ARGV  entry id of the letter, ticket (names this call, so that sending it again is not taken for another), max_queue,
--       attempt of the letter, attempt of the payload (larger than that), payload
-- reply 'replayed' | 'unknown' (there is no such letter any more) | 'running' |
--       'superseded' (under this id another life began later, or it was answered) |
--       'uncollected' (its batch has yet to collect the failure) | 'busy' (the door is closed)
local dead, request, results, tokenizer, prefill, stream = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local letter, ticket, max_queue = ARGV[1], ARGV[2], tonumber(ARGV[3])
local letter_attempt, attempt, payload = tonumber(ARGV[4]), ARGV[5], ARGV[6]

-- include: ending.lua
-- include: door.lua

local old = redis.call('HMGET', request, 'state', 'attempt', 'ticket', 'batch')
local state, old_attempt, batch = old[1], tonumber(old[2] or '0'), old[4]
if old[3] == ticket then
  redis.call('HSET', request, 'ticket', ticket) -- for whoever waits for the disk, as in admit.lua
  return 'replayed'
end
if state and not ENDED[state] then
  return 'running'
end
if state == 'finished' or (state and old_attempt > letter_attempt) then
  return 'superseded'
end
if batch and redis.call('PTTL', request) == -1 then -- ending.lua leaves the TTL to the batch
  return 'uncollected'
end
if is_closed(tokenizer, prefill, max_queue) then
  return 'busy'
end
if redis.call('XDEL', dead, letter) == 0 then
  return 'unknown'
end
redis.call('DEL', request, results)
redis.call('HSET', request, 'state', 'queued', 'attempt', attempt, 'n', '0', 'ticket', ticket)
redis.call('XADD', stream, '*', 'p', payload)
return 'replayed'
