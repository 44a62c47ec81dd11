"""Verdicts of the grader as a table: pairs of gold and answer, grouped by the rule that decides them."""

# gold <- answer: right; gold </- answer: wrong. Each heading states the rule for the lines below it.
TABLE = r"""
# a number is its value, however written
18 <- 18
18 <- 18.0
18 <- 18.
18 <- +18
18 <- 018
18 <- 18.000
18 <- 36/2
18 <- \frac{36}{2}
033 <- 33
0.5 <- .5
0.5 <- 1/2
0.5 <- \frac12
0 <- -0
-3 <- -3.0
7.10 <- 7.1
-\frac{1}{2} <- -1/2
-\frac{1}{2} <- \frac{-1}{2}
-\frac{1}{2} <- \frac{1}{-2}
-\frac{1}{2} <- -0.5
\frac{3}{4} <- \frac{6}{8}
\frac{3}{4} <- 0.75
\frac{3}{4} <- (3/4)
0.1\overline{6} <- \frac16
0.\overline{3} <- \frac{1}{3}
# a mixed number is a sum, with the sign in front of both
1\frac{1}{2} <- 3/2
1\frac12 <- 1.5
1\frac12 <- 1 1/2
-15\frac{3}{5} <- -15.6
33 \frac{1}{3} <- \frac{100}{3}
1\frac12 </- \frac12
1\frac12 </- 1\cdot\frac12
# powers of ten, words and scales
120000 <- 1.2 \times 10^5
120000 <- 1.2e5
120000 <- 1.2*10^{5}
120000 <- 12 \cdot 10^4
0.00012 <- 1.2\times10^{-4}
3.0 \times 10^8 <- 300000000
10^{-5} <- 0.00001
5 \text{ million} <- 5000000
5000000 <- 5 million
5 \text{ million} </- 5
1000 </- 10^2
\mbox{four} <- 4
7 <- seven
7 </- eight
18 </- eighteen hundred
# thousands separators, in strict groups
1,234 <- 1234
1234 <- 1,234
1234 <- 1{,}234
1234 <- 1,\!234
1234 <- 1\,234
11,\! 111,\! 111,\! 100 <- 11111111100
1234567 <- 1,234,567
1,234.5 <- 1234.5
1234 </- 1,23,4
1234 </- 1,2345
1234 </- 12,34
1234 </- 1.234
\dfrac{2469}{20,\!000} <- 0.12345
# the last line of a solution: a sum of letters is the name of its value, an expression with a coefficient is not
902 <- m+n=902
902 <- m + n = 841 + 61 = 902
902 <- $p + q + r = 902.$
3 <- a - b = 3
902 </- m + n = 841 + 62 = 902
902 </- m + n = 903
902 </- m + n = 841 + 61
902 </- m + n
18 </- 2x = 18
18 </- x + 1 = 18
18 </- a(2x+1) = 18
25 <- |z|^2 = 25
18 <- Total: 18
b </- a: b
20 </- 18 dollars = 20
18 </- x == 20
18 </- 18 =
x = 18 </- 18 = 19
18 <- 10m + n = 18
2z </- x + y = 2z
x + y = 5 <- y + x = 5
# another number is wrong
18 </- 118
18 </- -18
18 </- 81
18 </- 1 8
18 </- 18 18
18 </- 18.004
18 </- 18.000000001
18 </- 17.9999999999
18 </- 1_8
18 </- 0x12
5 </- 500
5 </- 0.05
5 </- 50
25 </- 52
\frac12 </- \frac21
\frac12 </- -\frac12
10^{20} </- 10^{20}+1
# two decimals are compared without a tolerance
0.1 </- 0.10000000001
1 </- 0.9999999999
1 </- 1.0000000000001
# a rounded decimal equals an exact value if it has at least ten significant digits
\frac{1}{12} <- 0.0833333333333
\frac{2}{3} <- 0.6666666667
\frac{2}{3} <- 0.6666666666
\frac{\sqrt{3}}{2} <- 0.8660254037844386
10\pi <- 31.4159265359
\frac13 </- 0.333
\frac13 </- 0.33333333
\frac23 </- 0.67
\frac23 </- 0.6666666688
\sqrt{2} </- 1.414
\pi </- 3.14
\pi </- 22/7
# adjacent factors are multiplied, not added, except in a mixed number
37 </- 18 19
37 </- {19}18
37 </- (18)(19)
342 <- (18)(19)
6\sin x <- 2(3)\sin x
\frac{5}{3}\pi <- 1\frac{2}{3}\pi
\frac{5}{2} </- 3\frac{-1}{2}
6 <- 3\frac{6}{3}*1.2
# no absolute rounding and no floats: 1/2^99 is not 1/2^98
\frac{1}{2^{99}} </- \frac{1}{2^{98}}
\frac{1}{2^{99}} </- 0
10^{-12} </- 0
2^{100} </- 2^{100}+1
2^{4950} </- 2^{4951}
\pi </- \pi+10^{-50}
1-\frac{1}{e} </- 1+\frac{1}{e}
\frac{1}{2004!} </- \frac{1}{2005!}
# delimiters, bold, boxes and prose are not part of the answer
18 <- $18$
18 <- $$18$$
18 <- \(18\)
18 <- \[ 18 \]
18 <- \boxed{18}
18 <- $\boxed{18}$
18 <- \fbox{18}
18 <- \boxed{\text{18}}
18 <- x = \boxed{18}
18 <- **18**
18 <- `18`
18 <- "18"
18 <- The answer is 18.
18 <- The answer is **18**.
18 <- The final answer is: $\boxed{18}$.
18 <- **Answer:** 18
18 <- Answer: 18
18 <- So the answer is 18
18 <- Therefore, the final answer is $18$.
18 <- = 18
18 <- \text{18}
18 <- \mathbf{18}
18 <- {18}
18 <- (18)
18 <- \displaystyle 18
18 <- 18,
18 <- 18;
18 <- 18\quad
18 <- 18\text{.}
# white space is ignored
18 <-   18  
\frac{1}{2} <- \frac { 1 } { 2 }
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <- \begin{pmatrix}1\\2\end{pmatrix}
# several answers are wrong
18 </- 18 or 20
18 </- 18, 20
18 </- 18 and 20
18 </- \text{18 or 19}
18 </- {18, 19}
18 </- x = 18 or x = 20
18 </- 18?20
18 </- 18 20
18 </- \boxed{18} or \boxed{20}
18 </- \boxed{18}\boxed{20}
18 </- \boxed{20} 18
18 </- between 18 and 18
# a negation or a remark is wrong
18 </- not 18
18 </- The answer is not 18
18 </- 18 is wrong
18 </- x is not = 18
18 </- 18\text{ maybe 19}
18 </- \text{correct}
18 </- \text{the same as the gold answer}
# an answer without content is wrong
18 </- $
18 </- \boxed{}
18 </- .
18 </- x
# LaTeX spellings of the same thing
\frac12 <- \frac{1}{2}
\frac12 <- \dfrac{1}{2}
\frac12 <- \tfrac12
\frac12 <- \cfrac{1}{2}
\frac12 <- \frac 12
\frac12 <- \frac 1 2
\frac12 <- \frac1{2}
\frac12 <- \frac{1}2
\frac{270}7 <- \frac{270}{7}
\frac{\sqrt6}3 <- \frac{\sqrt{6}}{3}
\frac\pi 2 <- \frac{\pi}{2}
\sqrt2 <- \sqrt{2}
\sqrt 2 <- \sqrt{2}
\sqrt10 <- \sqrt{10}
\left(3,4\right) <- (3,4)
\left[-\frac{1}{2}, 3\right) <- [-1/2,3)
x \le 5 <- x \leq 5
x < 5 <- x \lt 5
x > 5 <- x \gt 5
\frac12 <- 1 \div 2
\{1,2\} <- \lbrace 2, 1 \rbrace
|x| <- \lvert x \rvert
\emptyset <- \varnothing
1 + 274i <- 1+274\mathrm{i}
2^{2005} <- 2^2005
x^{10} <- x^10
# plain-text mathematics
\sqrt{2} <- sqrt(2)
\sqrt{2} <- \sqrt(2)
\sqrt{2} <- sqrt{2}
2\sqrt{3} <- 2*sqrt(3)
2\sqrt{3} <- 2 \cdot \sqrt{3}
\pi <- pi
\frac{\pi}{4} <- pi/4
\frac34\pi <- 3/4 \pi
y = -\frac{1}{2} x^2 + 4x - 6 <- y = -1/2 x^2 + 4x - 6
\frac{11x + 5}{x - 2} <- (11x+5)/(x-2)
\frac{1}{4m} <- 1/(4m)
\frac{x}{2} <- 1/2x
\frac{1}{2^{10}} <- 1/2^10
\infty <- infinity
\sin x <- sin(x)
\sqrt{x} <- x^(1/2)
x^2 <- x**2
x \le 5 <- x <= 5
# Unicode
1-\sqrt{2} <- 1 − √2
2\sqrt{3} <- 2√3
\pi <- π
-\infty <- -∞
x \le 5 <- x ≤ 5
12 <- ３×４
18 <- １８
x^2 <- x²
1\frac12 <- 1½
(3,4) <- （3，4）
90 <- 90°
x \in [-2,7] <- x ∈ [−2, 7]
5 </- 5²
25 <- 5²
# a percent sign may be missing or written out as a decimal; the value is not scaled in any other way
10\% <- 10
10\% <- 10%
10\% <- 10 percent
28 <- 28 pct
28\% <- 28pct.
28 </- 0.28 pct
10\% <- 10\text{ percent}
10\% <- 0.1
10\% <- \frac{1}{10}
10 <- 10\%
1/2 <- 50\%
10\% </- 1
10\% </- 0.01
10\% </- 100
0.5 </- 50
50 </- 0.5
# the value of a chain is its last member, if all members are equal
0.56 = 56\% <- 56\%
0.56 = 56\% <- 0.56
5 <- 2+3=5
5 <- x=2+3=5
\$\dfrac23 \approx \$0.67 <- \frac23
18 </- 18 = 19
19 </- 18 = 19
# degrees are a unit, but a factor inside a function
90^\circ <- 90
90^\circ <- 90 degrees
90^{\circ} <- 90^\circ
45^\circ, 135^\circ <- 135^\circ,45^\circ
(6,235^\circ) <- (6,235)
\tan 15^\circ <- 2-\sqrt{3}
\sin 30^\circ <- \frac{1}{2}
\sin 15^\circ </- \sin 15
\frac{\pi}{2} </- 90^\circ
# currency signs
\$18 <- 18
18 <- \$18
18 <- $18
18 <- 18$
18 <- \$18.00
18 <- €18
\$1,250 <- 1250
-\$0.50 <- -0.5
1.85\ \text{USD} <- \$1.85
# a unit may be missing
18 <- 18 dollars
\$18 <- 18 dollars
\$18 <- $18.00
\$18 <- 18
\$1,234 <- 1234 dollars
\$5000000 <- 5 million
\$18 </- 18 cents
\$18 </- 18 euros
-\$18 <- \$-18
18 <- 18\,
18 <- 18\;.
18 <- 18\\,
18 <- 18 ducks
18 <- 18\text{ ways}
18 <- 18 years old
5\text{ cm} <- 5
5\text{ cm}^2 <- 5
7 \text{ days} <- 7
\frac{3}{4}\pi\text{ inches} <- \frac{3\pi}{4}
6\frac{1}{6}\text{ feet} <- \frac{37}{6}
14 \text{ right triangles} <- 14
480 + 480\sqrt{3}\text{ feet} <- 480(1+\sqrt{3})
\approx 8.24 \text{ mph} <- 8.24
11 <- 11th
11 <- 11^{\text{th}}
8\!:\!34 \text{ p.m.} <- 8:34
2\text{ miles} </- 3 miles
18 </- 18 plus 2
18 </- 18 thousand
18 </- 18 dozens
# the same unit may have another spelling
5\text{ cm} <- 5 cm
5\text{ cm} <- 5cm
5\text{ cm} <- 5 centimeters
5\text{ cm} <- 5\,\mathrm{cm}
5\text{ cm}^2 <- 5 square centimeters
5\text{ cm}^2 <- 5\text{ cm}^{2}
10\text{ inches} <- 10 in
17\text{ meters} <- 17 m
17\text{ meters} <- 17m
144 \mbox{ m}^3 <- 144 m^3
25 \text{ ft} <- 25 feet
45\text{ mph} <- 45 miles per hour
6:00 PM <- 6:00 p.m.
8\!:\!34 \text{ p.m.} <- 8:34 PM
# another unit is wrong
5\text{ cm} </- 5 m
5\text{ cm} </- 5\text{ km}
5\text{ cm} </- 5 cm^2
7 \text{ days} </- 7 hours
6:00 PM </- 6:00 AM
9\text{ a.m.} </- 9 p.m.
# a letter is a variable, not a unit
2s </- 2
2 </- 2s
2k </- 2
14k </- 14
5x </- 5
5 </- 5x
# words
\text{even} <- even
\text{even} <- Even.
\text{even} <- \textbf{even}
\text{Monday} <- monday
\text{yes} <- Yes
\text{two lines} <- two lines
\text{ellipse} <- an ellipse
\text{June 20} <- June 20
\text{No solution} <- no solution
\text{CBAD} <- CBAD
\text{even} </- odd
\text{even} </- not even
\text{even} </- 2
\text{Monday} </- Sunday
\text{June 20} </- June 2
\text{yes} </- no
\text{circle} </- ellipse
\text{CBAD} </- ABCD
\text{ACF} </- AFC
\text{ACF} </- A, C
# choices
\text{(A)} <- A
\text{(A)} <- (A)
\text{(A)} <- \text{A}
\text{(A)} <- A.
(\text{E}) <- E
\text{(E)}, <- E
A <- (A)
\text{A} <- Option (A)
\text{A,B} <- B and A
\text{A, D, F, G, H} <- A,D,F,G,H
\text{(A)} </- B
\text{(A)} </- (B)
\text{A} </- A, B
# a list of words is a ranking
\text{Softball, Kickball, Picnic} <- Softball, Kickball, Picnic
\text{Softball, Kickball, Picnic} </- Picnic, Kickball, Softball
# the name before the value may be missing
x=5 <- 5
5 <- x=5
5 <- x = 5
k = \frac{-33}{2} <- -16.5
x_1 = 5 <- 5
f(x)=x^2 <- x^2
x^2 <- f(x) = x^2
y=2x+3 <- 2x+3
AB=12+12\sqrt{3} <- 12+12\sqrt{3}
30^\circ <- \angle ABC = 30^\circ
5 <- \text{Area} = 5 \text{ cm}^2
\theta = \frac{\pi}{3} <- \frac{\pi}{3}
x \in [-2,7] <- [-2,7]
(x,y)=(3,4) <- (3,4)
x=1, x=2 <- 1, 2
x=3, y=4 <- (3,4)
AB=9, CD=4 <- AB = 9 and CD = 4
x=5 </- 6
x=5 </- y=5
x=5 </- x=6
x \in [-2,7] </- [-2,7)
x=1, y=2 </- x=2, y=1
# equations are equal if they describe the same curve; a side of one is not equal to it
y=2x+3 <- y = 3+2x
y=2x+3 <- 2x-y+3=0
x+y=5 <- x=5-y
y=3 <- 3=y
x^2-4=0 <- x^2=4
2x + z - 5 = 0 <- 4x + 2z = 10
\frac{x^2}{16} - \frac{y^2}{9} = 1 <- 9x^2-16y^2=144
y=2x+3 </- y=2x-3
y=2x+3 </- y=3x+2
x^2+y^2=13 </- 13
x^2+y^2=13 </- x^2+y^2=14
x^2+y^2=13 </- x-x=0
x^2=4 </- x=2
18 </- 2x = 18
1=2 </- 3=5
2x + z - 5 = 0 </- 2x + z + 5 = 0
# inequalities
x \ge 5 <- 5 \le x
(2,\infty) <- x>2
[2,5) <- 2 \le x < 5
(-\infty,3) <- -\infty<x<3
(-\infty,3)\cup(3,\infty) <- x \neq 3
(-\infty,2)\cup(5,\infty) <- x<2 or x>5
x \le 5 </- x \ge 5
x \le 5 </- x \le 6
x \le 5 </- x < 5
x \le 5 </- 5
s^2 \le 8r^2 </- s^2 < 8r^2
(2,\infty) </- x \ge 2
# tuples are ordered; the brackets of an interval matter
(3,4) <- (3, 4)
(3,4) <- \left( 3, 4 \right)
(3,4) <- 3,4
(3,4) <- (\frac{6}{2}, 4.0)
(3,4) <- \langle 3,4 \rangle
(1,2,3) <- [1,2,3]
[0,1) <- [0, 1.0)
(-\infty, 3) <- (-∞, 3)
(3,4) </- (4,3)
(3,4) </- 4,3
(3,4) </- [3,4]
(3,4) </- (3,4,5)
(3,4) </- (3,)
(3,4) </- 3
(3,4) </- 7
(3,4) </- \frac{3}{4}
(-1,1,1) </- (-1,1,1]
[0,1) </- [0,1]
[0,1) </- (0,1)
[0,1) </- (0,1]
[0,1) </- 0,1
(2,\infty) </- [2,\infty)
(2,\infty) </- (2,\infty]
# unions
(-\infty,3)\cup(3,\infty) <- (3,\infty)\cup(-\infty,3)
(-\infty,3)\cup(3,\infty) <- (-∞,3)∪(3,∞)
(-\infty,3)\cup(3,\infty) <- \mathbb{R} \setminus \{3\}
(-\infty,\infty) <- \mathbb{R}
(-\infty,3)\cup(3,\infty) </- (-\infty,\infty)
(-\infty,3)\cup(3,\infty) </- (-\infty,3)
(-\infty,3)\cup(3,\infty) </- (-\infty,3]\cup(3,\infty)
(0,9) \cup (9,36) </- (0,36)
# lists of solutions and sets are unordered
1,2 <- 2,1
1,2 <- 1 and 2
1,2 <- 2 or 1
1,2 <- \{1,2\}
\{1,2\} <- \{2,1\}
\{1,2\} <- 1, 2
1,2 <- x = 1 or x = 2
12\text{ and }13 <- 12, 13
2, 3, \text{ and } 4 <- 4,3,2
6, 8\text{, and }10 <- 6,8,10
(-4, 27);(2, 15) <- (2,15), (-4,27)
\{5\} <- 5
1,3,3 <- 3,1,3
1,2 </- 1
1,2 </- 1,2,3
1,2 </- 1,3
1,2 </- 1,1
1,2 </- 12
1,3,3 </- 1,3
\{1,2\} </- (2,1)
# plus or minus
1 \pm \sqrt{19} <- 1+\sqrt{19},1-\sqrt{19}
\pm 3 <- 3, -3
\pm 3 <- -3 and 3
\{1\pm\sqrt{5},-2\} <- -2, 1+\sqrt5, 1-\sqrt5
1 \pm \sqrt{19} </- 1+\sqrt{19}
1 \pm \sqrt{19} </- 1 \pm \sqrt{17}
\pm 3 </- 3
# matrices are compared entry by entry
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <- \begin{bmatrix} 1 \\ 2 \end{bmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} <- (1,2)
\begin{pmatrix} 1/2 & 0 \\ 0 & 1 \end{pmatrix} <- \begin{pmatrix} \frac12 & 0 \\ 0 & 1 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <- \left[\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <- [[1,2],[3,4]]
\begin{pmatrix} 1 \\ 2 \end{pmatrix} </- \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} </- \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} </- \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} </- (1,2,3,4)
# ratios and times are compared part by part
1:2 <- 1 : 2
1:2 </- 2:1
1:2 <- \frac12
1.5:2 </- 15:2
12:30 </- 12:03
05\!:\!00 <- 5:00
4:30 </- 4:03
# surds and constants
\frac{2}{\sqrt{3}} <- \frac{2\sqrt{3}}{3}
\frac{\sqrt{2}}{2} <- \frac{1}{\sqrt{2}}
\sqrt{12} <- 2\sqrt{3}
\sqrt[3]{16} <- 2\sqrt[3]{2}
-3 \sqrt{5} - 5 <- -5-3\sqrt5
5(\sqrt{3}-1) <- 5\sqrt3-5
0.5\pi <- \frac{\pi}{2}
2^{10} <- 1024
4! <- 24
\log_2 8 <- 3
\binom{5}{2} <- 10
\frac{1}{2004!} <- 1/2004!
\sqrt{2} </- \sqrt{3}
\sqrt[3]{2} </- \sqrt{2}
7 \pi </- 7
\log_2 8 </- \log_8 2
# the imaginary unit
3 + 2i <- 2i + 3
-668i <- - 668 i
-1 <- i^2
\frac{1}{i} <- -i
3+2i </- 3-2i
3+2i </- 3+2j
# polynomials and functions, in any order or form
x^2+1 <- 1+x^2
(x+1)(x+2) <- x^2+3x+2
x^2+3x+2 <- (x+2)(x+1)
-1-7z <- -(7z+1)
\frac{x+2}{7} <- \frac{1}{7}(x+2)
\frac{x+2}{7} <- (x+2)/7
\frac{1}{x}+\frac{1}{y} <- \frac{x+y}{xy}
3^x - 2^x <- -2^x+3^x
2xy <- 2yx
8x^9-125y^6 <- -125y^6+8x^9
2 \sec x <- \frac{2}{\cos x}
\tan x <- \frac{\sin x}{\cos x}
\cos^2\alpha <- 1-\sin^2\alpha
x^2+1 </- x^2-1
(x+1)(x+2) </- (x-1)(x-2)
x+1 </- y+1
x+1 </- x
2^x </- x^2
ab </- a+b
2 \sec x </- 2 \cos x
\sqrt{x^2} </- x
f(x) </- f(y)
x_1 </- x_2
n! </- n
# a number in a base: digits and base are compared
204_5 <- 204_{5}
204_5 <- 204_{(5)}
204_5 <- 204 (base 5)
24_{10} <- 24
\text{A5}_{11} <- A5_{11}
0.0011_{2} <- 0.0011_2
204_5 </- 204_6
2\cdot 204_5 </- 2\cdot 204_6
204_5 </- 204
204_5 </- 54
204_5 </- 402_5
204_5 </- 204_{10}
24_{10} </- 24_{5}
# code, towers and undefined values equal nothing
18 </- __import__('os').system('true')
18 </- lambda: 18
18 </- int('18')
18 </- 9**9**9**9
18 </- ((20!)!)!
18 </- (10^8)!
18 </- \infty
18 </- \frac{0}{0}
\frac{0}{0} </- \frac{1}{0}
1 </- True
0 </- False
18 </- 18'
18 </- 18\ldots
18 </- 18)(
18 </- .*
18 </- %s
# sets, in other spellings
\{1,2,3\} <- 1, 2, and 3
\{x \mid x > 2\} <- (2, \infty)
\{1,2,3\} </- \{1,2\}
\{1,2,3\} </- (1,2,3,4)
\{\} <- \emptyset
\emptyset <- \text{empty set}
\emptyset </- \{0\}
0,1,2 <- x = 0, 1, 2
-1,2 <- \text{$-1$ and $2$}
-1,2 </- 1,-2
# intervals, in other spellings
(-\infty, 5] <- (-infty, 5]
(-\infty, 5] <- \left(-\infty, 5\right]
[3, \infty) <- x \geq 3
(0,1)\cup(1,2) <- (0, 1) U (1, 2)
[-3, 3] <- -3 \leq x \leq 3
[-3, 3] </- (-3,3)
[-3, 3] </- -3 < x < 3
(-\infty, 5] </- (-\infty, 5)
(2, \infty) <- \{x : x > 2\}
# matrices and vectors, in other spellings
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} <- \begin{pmatrix} -\frac{1}{3} \\[4pt] \frac{2}{3} \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix} <- (1, 2, 3)
\begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix} <- <1, 2, 3>
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} </- \begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <- [[1, 2], [3, 4]]
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <- \mathbf{M} = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
# units, in other spellings
5 <- 5 \text{ square units}
5 \text{ square inches} <- 5 \text{ in}^2
15\text{ mph} <- 15 mi/h
30 <- 30\ \text{m/s}
30 <- 30\frac{\text{m}}{\text{s}}
30 <- 30 \text{ m}^3
2 \text{ hours} </- 2 minutes
12\text{ quarts} <- 12 quarts
12 <- 12 students
12 <- \text{twelve}
12 </- 12 hundred
12 </- 12 dozen
# mixed numbers, in other spellings
2\frac{3}{4} <- 2 \frac{3}{4}
2\frac{3}{4} <- 2 + \frac{3}{4}
2\frac{3}{4} </- \frac{6}{4}
-2\frac{3}{4} </- -2 + \frac34
# percentages, in other spellings
25\% <- 25\text{%}
25 <- 25 percent
12.5\% <- 12\frac12\%
-25\% <- -25 %
25\% </- 2.5
25\% </- 0.025
150\% <- 1.5
# thousand separators, in other spellings
10,000 <- 10 000
10,000 <- 10\,000
1,000,000 <- 10^6
10,000 </- 10.000
10,000 </- 10,00
# choices, in other spellings
\text{(B)} <- (B) 12
\text{(B)} <- \mathrm{B}
\text{B} <- (b)
\text{B} <- B)
\text{B} <- The answer is (B).
\text{B} </- \text{(C)}
D </- 4
# text answers, in other spellings
\text{Evelyn} <- evelyn.
\text{odd} </- even
\text{odd} </- \text{neither}
\text{Saturday} <- Saturday
\text{pentagon} <- a pentagon
\text{parallelogram} </- \text{rectangle}
\text{10:30 a.m.} <- 10:30 AM
\text{10:30 a.m.} </- 10:30 PM
\text{11 and 12} <- 11, 12
# degree signs, in other spellings
60^\circ <- 60 degrees
60^\circ <- 60 ^ \circ
60^\circ <- \theta = 60^\circ
60^\circ C <- 60
\frac{\pi}{3} </- 60^\circ
# base subscripts, in other spellings
1011_2 <- 1011_{\text{two}}
1011_2 <- (1011)_2
1011_2 <- 1011 \text{ base 2}
1011_2 <- 1011_\text{two}
1011_2 </- 1011
1011_2 </- 11
1011_2 </- 1011_3
4A3_{12} <- 4A3_{12}
# plus or minus, in other spellings
\pm\sqrt{5} <- x = \pm \sqrt{5}
2 \pm i <- 2+i, 2-i
\frac{1\pm\sqrt{5}}{2} <- \frac{1}{2} \pm \frac{\sqrt{5}}{2}
\pm\sqrt{5} </- \sqrt{5}
\pm 1, \pm 2 <- 1,-1,2,-2
# scientific notation, in other spellings
6.02\times 10^{23} <- 6.02 \cdot 10^{23}
6.02\times 10^{23} <- 6.02 x 10^23
1.5\times10^{-3} </- 1.5 \times 10^3
# LaTeX spacing, in other spellings
3\sqrt{2} <- 3\,\sqrt{2}
(1, 2) <- (1,~2)
\frac{\sqrt{3}}{3} <- \frac{\sqrt 3}{3}
\frac{3}{4} <- {3 \over 4}
# currency, in other spellings
\$10.50 <- 10.5
\$10.50 <- USD 10.50
\$0.75 <- 75 cents
75\text{ cents} <- \$0.75
75\text{ cents} <- 75¢
\$75 </- 75 cents
\$3 <- 3\text{ dollars}
# multiple answers, in other spellings
(1,2), (3,4) <- \{(1,2),(3,4)\}
(1,2), (3,4) </- (2,1),(3,4)
1, 2 </- (1,2), 3
3, 5, 7 <- 3; 5; 7
3, 5, 7 </- 3,5
(x,y) = (1,2) <- x=1, y=2
# algebra, in other spellings
-x+3 <- 3-x
y = 3x + 2 <- 3x+2
\frac{1}{2}\ln 3 <- \ln\sqrt{3}
\sqrt[3]{2} <- 2^{1/3}
|x| </- x
x^2 </- x^{-2}
\frac{2}{3} </- \frac{3}{2}
3x </- 3
3 + 4i </- 3 - 4i
-\frac{1}{2}i <- -\frac{i}{2}
# last lines of completions
18 <- 18 is the answer
18 <- Answer: $18$ apples
18 <- \text{The answer is } 18
18 <- **\boxed{18}**
18 <- # 18
18 <- #### 18
18 <- \approx 18
18 <- n=18
18 <- 18 = x
18 <- 3\times 6 = 18
18 </- 3 \times 6 = 19
18 <- \$ 18
18 <- 1.8e1
18 </- 1.8
18 </- 180
18 </- 18?
18 </- ~18 to 20
18 </- 17-19
18 </- 18-20
18 </- 18 or more
18 </- at least 18
18 </- less than 18
18 </- 18+
18 </- 18, or maybe 19
18 </- \{18, 19\}
18 </- (18, 18)
18 </- 18^2
18 </- \sqrt{18}
18 </- 18!
18 </- 18i
18 </- 18\pi
18 </- \frac{1}{18}
18 </- 18 \text{ or } 19
18 </- |18|-1
18 </- 0.18
18 </- 18\%\text{ of }100
18 </- \text{eighteen or nineteen}
18 </- 1 and 8
18 </- any number
18 </- all
18 </- \text{see above}
18 </- x=y
18 </- 18=18=19
18 </- \boxed{18} \boxed{19}
18 </- \phantom{19}18 19
18 </- \text{18}\text{19}
-1 <- (-1)
-1 <- negative 1
-1 </- 1
\frac{5}{9} <- \frac{5}{9}.
\frac{5}{9} <- 0.555555555556
\frac{5}{9} </- 0.56
\frac{5}{9} </- 0.5556
\frac{5}{9} <- \left(\frac{5}{9}\right)
\frac{5}{9} <- \frac{10}{18}
\frac{3\sqrt{3}}{4} <- \frac{3}{4}\sqrt{3}
\frac{3\sqrt{3}}{4} <- \frac{3 \sqrt{3}}{4} \text{ square units}
\frac{3\sqrt{3}}{4} </- \frac{3\sqrt{2}}{4}
\frac{3\sqrt{3}}{4} </- 1.299
2\sqrt{3} - 1 <- -1 + 2\sqrt{3}
2\sqrt{3} - 1 </- 2\sqrt{3}+1
9\pi <- 9*pi
9\pi <- 9\cdot \pi
9\pi </- 28.27
9\pi </- 9
\frac{\pi}{2} - 1 <- \pi/2 - 1
[0,\infty) <- x \ge 0
[0,\infty) <- \{x \mid x \geq 0\}
[0,\infty) <- \{x \in \mathbb{R} : x \ge 0\}
[0,\infty) </- (0,\infty)
[0,\infty) </- x > 0
(-\infty, -2) \cup (2, \infty) <- x<-2, x>2
(-\infty, -2) \cup (2, \infty) </- (-\infty, -2] \cup [2, \infty)
(3, \frac{\pi}{2}) <- (r,\theta) = (3, \frac{\pi}{2})
(3, \frac{\pi}{2}) </- (3, \frac{\pi}{3})
(2,-3,5) <- (x,y,z) = (2,-3,5)
(2,-3,5) </- 2,3,5
x^3 - 3x + 2 <- p(x) = x^3 - 3x + 2
x^3 - 3x + 2 </- x^3 + 3x + 2
y = 2x - 1 <- 2x - y - 1 = 0
y = 2x - 1 </- y = 2x + 1
(x-2)^2 + (y+3)^2 = 25 <- (x - 2)^2 + (y + 3)^2 = 5^2
(x-2)^2 + (y+3)^2 = 25 <- x^2+y^2-4x+6y-12=0
1 + 2i <- 1 + 2\mathrm{i}
1 + 2i </- 1 - 2i
1+2i, 1-2i <- 1 \pm 2i
e^{i\pi/3} <- e^{\frac{i\pi}{3}}
\log_2 3 <- \log_2(3)
\binom{10}{3} <- 120
3:2 <- 3:2
3:2 <- 3 to 2
5:30 \text{ p.m.} <- 5:30 pm.
0 </- 1
1 </- 10
0.1 <- 1/10
.0625 <- \frac{1}{16}
3.14 </- \pi
\text{A} <- A. 12
\text{(C)} <- \boxed{\text{(C)}\ 15}
\text{(C)} <- C) 15
\text{(C)} <- (C) 15 cm
\text{(C)} </- (A) 15
\text{(C)} </- (B) or (C)
\text{(C)} </- C, D
\text{Yes} </- No
\text{even} <- \mathrm{even}
\$2.40 <- $2.4
\$2.40 <- 240 cents
\$2.40 </- 2.40 cents
\$2.40 </- \$24
12\text{ feet} </- 12 inches
5\sqrt{2} <- \sqrt{50}
\mathbb{R} <- all real numbers
\frac{a+b}{2} <- \frac{1}{2}(a+b)
2ab </- 2a+b
\sqrt{x+1} <- (x+1)^{1/2}
3^{-2} <- 1/9
200 <- 2^3 \cdot 5^2
200 <- 2^{3} \times 5^{2}
200 </- 2^3 \cdot 5^3
2^3 \cdot 5^2 <- 2^{3}5^{2}
\text{(C)} </- C) 15, D) 16
15 </- \text{(C)} 16
18 </- \text{not the answer is } 18
18 </- 19 = x
1011_2 </- (1011)_3
(2,3) </- <3,2>
\emptyset </- \text{empty}
\$1 </- 1 cent
100\text{ cents} <- \$1
100\text{ cents} </- \$100
10,000 </- 10 001
10 </- 10 000
2\times10^3 <- 2 x 10^3
x^{10} </- 2x10
\{x \mid x > 2\} </- (2, 3)
\{x \mid x > 2\} </- x < 2
\text{(B)} </- (B)(C)
x </- (x)2
\text{(B)} </- (B) or (C)
\text{(B)} </- (B) 12, (C) 15
# words of two or three letters are words: their order counts
no </- on
abc </- cba
abc </- bca
xyz <- xyz
no <- No
# dates, ranges and telephone numbers equal nothing but themselves
2024-01-05 <- 2024-01-05
2024-01-05 </- 2024-05-01
2024-01-05 </- 2018
1999-31-12 </- 1999-12-31
-679 </- 555-1234
-1 </- 3-4
-1 </- 2020-2021
-1 <- 3 - 4 = -1
# a unit may be missing but not wrong: speeds, angles, temperatures, currencies
5\text{ km/h} </- 5 mph
5\text{ km/h} </- 5 miles per hour
5\text{ km/h} <- 5 kilometers per hour
5\text{ km/h} <- 5 kph
5\text{ mph} <- 5
45\text{ radians} </- 45 degrees
45\text{ radians} <- 45 rad
5^\circ F </- 5^\circ C
5^\circ C <- 5 degrees Celsius
5^\circ C </- 5 degrees Fahrenheit
5^\circ C <- 5 degrees
5^\circ C <- 5°C
5^\circ C <- 5
\$5 </- €5
\$5 </- £5
€5 <- 5€
€5 <- 5 euros
£5 <- 5 pounds
£1,234 <- 1234
# "and" is not "or", but the solutions of an equation may have either
x<2\text{ or }x>5 </- x<2 and x>5
(-\infty,2)\cup(5,\infty) </- x<2 and x>5
x \le 2 \text{ or } x \ge 5 </- x \le 2 \text{ and } x \ge 5
\text{A and B} </- A or B
\text{A and B} <- A, B
x = 1 \text{ or } x = 2 <- x = 1 and x = 2
\pi \text{ or } 2\pi <- \pi and 2\pi
# a set is no tuple, and the set of the empty set is not empty
(1,2) </- \{1,2\}
\{1,2,3\} </- (1,2,3)
\emptyset </- \{\emptyset\}
# capital and small letters are different variables
x^2+1 </- X^2+1
x^2+1 <- 1+x^2
# a long decimal is rounded or cut off
\frac12 </- 0.50000000001
-\frac23 <- -0.6666666666
-\frac23 <- -0.6666666667
-\frac23 </- -0.6666666665
"""


def read_table(table: str) -> list[tuple[str, str, bool, str]]:
    """(gold, answer, expected, reason) of each line."""
    cases = []
    reason = ""
    for line in table.strip("\n").split("\n"):
        if line.startswith("# "):
            reason = line[2:]
            continue
        sign = " </- " if " </- " in line else " <- "
        gold, answer = line.split(sign, 1)
        cases.append((gold, answer, sign == " <- ", reason))
    return cases


CASES = read_table(TABLE)
