#!lua flags=allow-oom
-- Feeds the next line of a batch: guarantees that each line is fed once, by moving the cursor in the same step, only
-- while the batch is in progress, and only by the one whose turn it is to feed: another may know less of what is
-- finished. A line that cannot become a request goes straight to the lines that are done, with its error. The others
-- meet the same door as every request.
--
-- KEYS  batch, done stream, request, results, tokenizer stream, prefill stream, index of deadlines
-- ARGV  cursor (the line), kind: 'request' | 'refused' | 'skip', payload (of the request, or empty),
--       max_queue, nonce of the turn, attempt of the payload ('0' where none is given), timeout_ms of the request
--       ('0' where none is given)
-- reply 'ok' | 'busy' (the door is closed, or the attempt is not larger than the one it takes the place of) |
--       'moved' (the cursor is elsewhere, the batch is not in progress, or the turn is over)
local batch, done, request, results, tokenizer, prefill = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local cursor, kind, payload, max_queue, nonce = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local attempt, deadlines, timeout_ms = ARGV[6] or '0', KEYS[7], tonumber(ARGV[7] or '0')

-- include: ending.lua
-- include: door.lua

local fields = redis.call('HMGET', batch, 'state', 'cursor', 'feed_nonce')
if fields[1] ~= 'in_progress' or (fields[2] or '0') ~= cursor or fields[3] ~= nonce then
  return 'moved'
end
if kind == 'request' then
  -- A request of that name can only be one that was fed before the batch failed, or before its record was made
  -- again: it goes on as it is, or is done already. One that was cancelled, or whose results are gone, begins anew.
  -- Then its attempt has to be larger, so that entries of the old one which are still in a stream are refused.
  local known = redis.call('HMGET', request, 'state', 'attempt')
  local state = known[1]
  if not state or state == 'cancelled' or (ENDED[state] and redis.call('EXISTS', results) == 0) then
    if is_closed(tokenizer, prefill, max_queue) or (state and tonumber(known[2] or '0') >= tonumber(attempt)) then
      return 'busy'
    end
    redis.call('DEL', request, results)
    redis.call('HSET', request, 'state', 'queued', 'attempt', attempt, 'n', '0', 'batch', batch, 'line', cursor)
    limit_time(request, deadlines, timeout_ms)
    redis.call('XADD', tokenizer, '*', 'p', payload)
  elseif ENDED[state] then
    redis.call('PERSIST', request)
    redis.call('PERSIST', results)
    redis.call('XADD', done, '*', 'line', cursor)
  else
    redis.call('HSET', request, 'batch', batch, 'line', cursor) -- a replayed one is nobody's line until now
  end
elseif kind == 'refused' then
  redis.call('XADD', done, '*', 'line', cursor)
end
redis.call('HSET', batch, 'cursor', cursor + 1)
if kind ~= 'skip' then
  redis.call('HINCRBY', batch, 'admitted', 1)
end
return 'ok'
